"""A board or an alert uses each metric, or the catalogue says why none does."""

from __future__ import annotations

import pytest

from tools.monitoring.metric_usage import metric_usage
from vcpo.metrics import catalogue


@pytest.fixture(scope="module")
def usage():
    return metric_usage(frozenset(metric.name for metric in catalogue.ALL))


def test_every_metric_is_used_or_says_why_not(usage):
    unused = {name for name, found in usage.items() if not found.boards and not found.alerts}
    excused = {metric.name for metric in catalogue.ALL if metric.not_shown}
    assert unused == excused


def test_a_metric_is_used_where_its_buckets_are(usage):
    assert "vcpo-off-policy" in usage["vcpo_policy_lag_steps"].boards


def test_a_metric_is_used_where_a_series_recorded_from_it_is(usage):
    assert "VCPOEffectiveSampleSizeLow" in usage["vcpo_ess_mean_ratio"].alerts
