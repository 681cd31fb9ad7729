"""The dashboards: described once, written for Grafana by `scripts/render_manifests.py`."""

from typing import Final

from tools.monitoring.dashboards.board import Board
from tools.monitoring.dashboards.off_policy import OFF_POLICY
from tools.monitoring.dashboards.operator import OPERATOR_BOARD
from tools.monitoring.dashboards.rollout import ROLLOUT_FLEET
from tools.monitoring.dashboards.run import RUN_OVERVIEW

BOARDS: Final[tuple[Board, ...]] = (OFF_POLICY, RUN_OVERVIEW, ROLLOUT_FLEET, OPERATOR_BOARD)

__all__ = ["BOARDS"]
