"""Over journals of real runs exactly the right alerts fire, at a pace of a second a minute."""

from __future__ import annotations

import json

from tests.fixtures.rules.cases import labelled, promtool_tests
from tests.fixtures.rules.promtool import needs_promtool, promtool
from tests.fixtures.rules.recorded_runs import recorded_steps, scraped_series

SLOWED = 60
"""A step then takes 15 to 25 seconds, as those of large models do."""
BOUNDS = {"healthy": 6, "collapse": 48, "recovery": 48}
"""The runs' `algorithm.maxPolicyLagSteps`."""

WARNING, COLLAPSED = "VCPOCollapseWarning", "VCPORewardCollapsed"
LOW = "VCPOEffectiveSampleSizeLow"
THROTTLED = "VCPOThrottledForLong"
SLOWED_DOWN = "VCPOLearningRateBackedOff"

COLLAPSE = {
    # Step 5 is critical at 3:44, and step 7 is the third in a row.
    4: set(),
    5: set(),
    # The reward falls at 7:37, at step 11. This run had no rollbacks.
    7: {WARNING},
    12: {WARNING, COLLAPSED},
    # The relative ESS is below 0.3 from 2:58 to 31:14, so for ten minutes at 12:58.
    13: {WARNING, COLLAPSED, LOW},
    23: {WARNING, LOW},
    # The score falls to 0.38 at 31:20. The limit fell from 48 at 8:50, sixty steps ago.
    32: {THROTTLED},
    39: {WARNING, THROTTLED},
}
"""Alerts that fire, by minute. None is critical but that of the reward: the limit is above 0."""

RECOVERY = {
    # Step 5 is critical at 4:22; the limit falls from 48 to 0 at 5:41.
    6: set(),
    10: {WARNING},
    # The score falls to 0.6 at 10:18, and the count of critical steps begins anew.
    11: set(),
    40: set(),
    # Critical again from 43:10 to 46:40. The recorded rate stays at a quarter from then on.
    44: {SLOWED_DOWN},
    45: {WARNING, SLOWED_DOWN},
    46: {WARNING, SLOWED_DOWN},
    51: {SLOWED_DOWN},
    # The limit is 9 of 48 after 40 minutes, and rises.
    90: {SLOWED_DOWN},
}


def firing_at(name: str, expected: dict[int, set[str]], folder):
    series = scraped_series(recorded_steps(name), slowed=SLOWED, bound=BOUNDS[name])
    test = {
        "interval": "15s",
        "input_series": [
            {"series": labelled(key, "ml"), "values": values} for key, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)
                ],
            }
            for minute, alerts in expected.items()
        ],
    }
    path = folder / "tests.json"
    document = {**promtool_tests([]), "evaluation_interval": "15s", "tests": [test]}
    path.write_text(json.dumps(document))
    return promtool("test", "rules", path)


@needs_promtool
def test_a_healthy_run_raises_no_alert_at_any_minute(tmp_path):
    assert firing_at("healthy", {minute: set() for minute in range(1, 40)}, tmp_path) == ""


@needs_promtool
def test_a_collapse_raises_exactly_its_alerts_and_the_first_one_before_the_reward_falls(tmp_path):
    assert firing_at("collapse", COLLAPSE, tmp_path) == ""


@needs_promtool
def test_alerts_resolve_when_the_throttle_has_cured_the_run_and_fire_again_at_the_next_dip(
    tmp_path,
):
    assert firing_at("recovery", RECOVERY, tmp_path) == ""


@needs_promtool
def test_a_collapse_is_not_taken_for_a_healthy_run(tmp_path):
    assert WARNING in firing_at("collapse", {7: set()}, tmp_path)
