"""The dashboards: described once, written for Grafana by `scripts/render_dashboards.py`."""

from __future__ import annotations

from typing import Final

from vcpo_monitoring.dashboards.board import Board
from vcpo_monitoring.dashboards.off_policy import OFF_POLICY
from vcpo_monitoring.dashboards.panel_queries import PanelQuery, panel_path, panel_queries

BOARDS: Final[tuple[Board, ...]] = (OFF_POLICY,)

__all__ = ["BOARDS", "PanelQuery", "panel_path", "panel_queries"]
