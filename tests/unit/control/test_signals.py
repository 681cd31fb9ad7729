"""Shares that signals derive from the record of the last step."""

from __future__ import annotations

from tests.unit.control.plant import signals


def test_relative_ess_is_a_share_of_the_on_policy_ratio():
    seen = signals(ess_ratio_mean=0.2, ess_ratio_low=0.1, on_policy_ess_ratio=0.8)
    assert (seen.relative_ess_ratio_mean, seen.relative_ess_ratio_low) == (0.25, 0.125)


def test_relative_ess_is_one_where_the_batch_beats_the_calibration():
    assert signals(ess_ratio_mean=0.9, on_policy_ess_ratio=0.6).relative_ess_ratio_mean == 1.0


def test_a_step_whose_weights_have_no_value_has_no_ess():
    assert signals(ess_ratio=0.0).relative_ess_ratio is None
