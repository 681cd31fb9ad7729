import pytest

from vcpo.report.numbers import compact, decimal, duration, finite, mean, whole


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_is_unknown(value):
    assert finite(value) is None
    assert decimal(value, ".2f") == "-"
    assert duration(value) == "-"


def test_nothing_has_no_mean():
    assert mean([]) is None
    assert mean(iter([1.0, 4.0])) == 2.5


def test_a_missing_count_is_unknown():
    assert whole(None) == "-"


def test_counts_have_their_thousands_separated():
    assert whole(1280000) == "1,280,000"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (0.1, "0.1"),
        (0.12345678, "0.1235"),
        (-2.5, "-2.5"),
        (999.96, "1000"),
        (10000.0, "10,000"),
        (0.0003, "0.0003"),
        (2.5e-06, "2.5e-06"),
        (2.5e9, "2.5e+09"),
    ],
)
def test_numbers_on_an_axis_are_short(value, words):
    assert compact(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (192.0, "3m 12s"),
        (7500.0, "2h 05m"),
        (-3.0, "0s"),
    ],
)
def test_durations_name_their_two_largest_units(seconds, words):
    assert duration(seconds) == words
