"""The judgement of an alert, on samples written by hand."""

from __future__ import annotations

from tests.observation.alerts import early_firings_s, longest_above_s

SCRAPED = ((10.0, 0.2), (10.5, 0.8), (11.0, 0.7), (11.75, 0.7), (12.0, 0.1), (12.5, 0.9))


def test_an_alert_fires_early_if_the_window_before_it_has_a_sample_below_the_threshold():
    firings_s = [10.9, 11.4, 11.8, 12.1, 13.2]
    assert early_firings_s(firings_s, SCRAPED, threshold=0.7, window_s=1.0) == [10.9, 12.1]


def test_an_alert_fires_early_if_nothing_was_scraped_in_the_window_before_it():
    assert early_firings_s([9.0, 14.0], SCRAPED, threshold=0.7, window_s=1.0) == [9.0, 14.0]


def test_the_time_above_a_threshold_runs_from_its_first_sample_to_its_last():
    assert longest_above_s(SCRAPED, 0.7) == 11.75 - 10.5
    assert longest_above_s(SCRAPED, 0.95) == 0.0
    assert longest_above_s((), 0.7) == 0.0
