"""The alerts judge a run alike whether a step takes a second, a minute or a quarter of an hour."""

from __future__ import annotations

import pytest

from tests.fixtures.rules.paces import PACES_S, alerts_at
from tests.fixtures.rules.promtool import needs_promtool

pytestmark = needs_promtool


@pytest.mark.parametrize("pace_s", PACES_S)
def test_from_an_hour_of_load_over_a_restart_to_the_end_only_a_collapse_of_the_reward_alerts(
    tmp_path, pace_s
):
    assert alerts_at(pace_s, tmp_path, collapses=True) == {
        "VCPOEvaluationFalling",
        "VCPONotRolledBack",
        "VCPORewardCollapsed",
    }
