"""Every query of every panel as a Prometheus is asked it, and the address of a panel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vcpo.metrics import catalogue
from vcpo_monitoring.dashboards.board import INSTANT, Board
from vcpo_monitoring.metric_names import names_in


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelQuery:
    """One query of a panel, with the variables of its board filled in."""

    board: str
    """Uid of the board."""
    panel: str
    """Slug of the panel."""
    panel_id: int
    title: str
    expression: str
    """PromQL."""
    legend: str
    is_instant: bool
    """Whether the panel asks for one moment, not for a range of time."""
    needs: str
    """What its metrics need to have a sample, in words; empty where every run has them."""


OPERATOR_HOST: Final = "the operator as host"
"""What panels of the operator need, in the words of `PanelQuery.needs`."""
_FEATURES: Final = {metric.name: metric.appears_with or "" for metric in catalogue.ALL} | {
    metric.name: metric.appears_with or OPERATOR_HOST for metric in catalogue.OPERATOR
}
_OF_THE_OPERATOR: Final = ('part="operator"', 'condition="Ready"')
"""Matchers of series that a local run lacks, of metrics that it has."""
_VARIABLE: Final = re.compile(r"\$([a-z_]+)")


def needs_of(expression: str) -> str:
    """Return what the metrics of an expression need, as the catalogue declares it."""
    features = {_FEATURES.get(name, "") for name in names_in(expression)}
    if any(matcher in expression for matcher in _OF_THE_OPERATOR):
        features.add(OPERATOR_HOST)
    return " and ".join(sorted(feature for feature in features if feature))


def filled_in(expression: str, *, run: str, namespace: str, interval: str) -> str:
    """Return an expression with values for the variables of a board.

    namespace: a regular expression; empty matches a local run only, `.*` any run.
    interval: `$__rate_interval`, such as `1m`: at least four times the time between two scrapes.
    Raises: ValueError naming a variable that is none of a board.
    """
    values = {
        "cluster": ".*",
        "namespace": namespace,
        "run": run,
        "__rate_interval": interval,
    }
    names = set(_VARIABLE.findall(expression))
    if unknown := names - values.keys():
        raise ValueError(f"no board has the variable {sorted(unknown)[0]!r}: {expression}")
    return _VARIABLE.sub(lambda match: values[match[1]], expression)


def panel_queries(
    boards: tuple[Board, ...], *, run: str, namespace: str = ".*", interval: str = "1m"
) -> Iterator[PanelQuery]:
    """Yield each query of each panel for one run; see `filled_in` for the arguments."""
    for board in boards:
        for panel in board.panels:
            for query in panel.queries:
                yield PanelQuery(
                    board=board.uid,
                    panel=panel.slug,
                    panel_id=panel.id,
                    title=panel.title,
                    expression=filled_in(
                        query.expression, run=run, namespace=namespace, interval=interval
                    ),
                    legend=query.legend,
                    is_instant=panel.kind in INSTANT,
                    needs=needs_of(query.expression),
                )


def panel_path(uid: str, panel_id: int) -> str:
    """Return the address of a panel below Grafana's own; variables may follow after an `&`."""
    return f"/d/{uid}?viewPanel={panel_id}"
