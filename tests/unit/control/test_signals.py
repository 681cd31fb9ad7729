"""Signals out of their range are refused."""

from __future__ import annotations

import math

import pytest

from tests.unit.control.plant import signals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("ess_ratio_mean", math.nan),
        ("ess_ratio_mean", 1.01),
        ("ess_ratio_low", -0.1),
        ("on_policy_ess_ratio", 0.0),
        ("warning_score", 1.01),
        ("warning_score", math.nan),
        ("batch_trajectories", 0),
        ("learner_idle_ratio", math.inf),
        ("buffered", -3),
        ("lag_p50", -1),
        ("age_s", math.nan),
        ("consumed_per_s", math.inf),
        ("reward_mean", math.nan),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*, not {value}"):
        signals(**{field: value})


def test_a_negative_number_of_workers_is_refused_with_its_group():
    with pytest.raises(ValueError, match=r"ready_workers\['spot'\] must be at least 0, not -1"):
        signals(ready_workers={"spot": -1})


def test_relative_ess_is_a_share_of_the_on_policy_ratio():
    seen = signals(ess_ratio_mean=0.2, ess_ratio_low=0.1, on_policy_ess_ratio=0.8)
    assert (seen.relative_ess_ratio_mean, seen.relative_ess_ratio_low) == (0.25, 0.125)


def test_relative_ess_is_one_where_the_batch_beats_the_calibration():
    assert signals(ess_ratio_mean=0.9, on_policy_ess_ratio=0.6).relative_ess_ratio_mean == 1.0
