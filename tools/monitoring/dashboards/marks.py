"""Events that boards mark over their panels, so that a curve and its cause are seen together."""

from __future__ import annotations

from dataclasses import dataclass

from tools.monitoring.dashboards.board import Board, Color
from tools.monitoring.dashboards.promql import OPERATOR, RUN, RUNS, increase, selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A kind of event: it lasts while its query returns a series."""

    name: str
    expression: str
    title: str
    """Text of one event, with labels in braces."""
    color: Color


def marks(board: Board) -> tuple[Mark, ...]:
    """Return the events to mark: of the chosen run, or of all runs where a board shows no run."""
    scope = RUN if board.has_run else RUNS
    # Alerts about no run, such as a missing operator, concern every run.
    alerts = f'{RUNS},run=~"($run)?"' if board.has_run else OPERATOR
    throttles = increase("vcpo_run_throttles_total", "direction", scope=scope)
    restarts = increase("vcpo_run_learner_restarts_total", scope=scope)
    firing = selector("ALERTS", 'alertname=~"VCPO.*",alertstate="firing"', alerts)
    return (
        Mark(
            name="Throttles",
            expression=f"{throttles} > 0",
            title="{{run}}: lag limit, {{direction}}",
            color=Color.WARNING,
        ),
        Mark(
            name="Restarts",
            expression=f"{restarts} > 0",
            title="{{run}}: learner restarted",
            color=Color.NEUTRAL,
        ),
        *_dangers(scope),
        Mark(name="Alerts", expression=firing, title="{{run}} {{alertname}}", color=Color.BAD),
    )


def _dangers(scope: str) -> tuple[Mark, ...]:
    critical = selector("vcpo_critical_steps_in_a_row", scope=scope)
    rollbacks = selector("vcpo_learner_rollbacks", scope=scope)
    return (
        Mark(
            name="Critical",
            expression=f"max by (namespace, run) ({critical}) > 0",
            title="{{run}}: early warning critical",
            color=Color.BAD,
        ),
        Mark(
            name="Rollbacks",
            expression=f"max by (namespace, run) (delta({rollbacks}[$__rate_interval])) > 0",
            title="{{run}}: rolled back",
            color=Color.BAD,
        ),
    )
