"""Boards as dashboards of Grafana 11 or newer: JSON that a sidecar or a person can import.

The data source, the cluster, the namespace and the run are variables. `All` namespaces is `.*`,
because the series of a local run have no namespace.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from typing import Final, TypeAlias

from grafana_foundation_sdk.builders import (
    dashboard as builders,
)
from grafana_foundation_sdk.builders import (
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from tools.monitoring.dashboards.board import (
    COLUMNS,
    INSTANT,
    Board,
    Kind,
    Panel,
    Place,
    Query,
    places,
    row_tops,
)
from tools.monitoring.dashboards.grafana_kinds import (
    heat_map,
    state_timeline,
    statistic,
    table_of,
    time_series,
)
from tools.monitoring.dashboards.marks import Mark, marks
from tools.monitoring.dashboards.promql import RUNS

_SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_STEP: Final = "30s"
"""Least time between two points of a mark."""

_PanelBuilder: TypeAlias = (
    timeseries.Panel | heatmap.Panel | stat.Panel | table.Panel | statetimeline.Panel
)
_BUILDERS: Final[dict[Kind, Callable[[Panel], _PanelBuilder]]] = {
    Kind.LINES: time_series,
    Kind.STACK: time_series,
    Kind.EVENTS: time_series,
    Kind.HEATMAP: heat_map,
    Kind.STAT: statistic,
    Kind.NAMES: statistic,
    Kind.TABLE: table_of,
    Kind.STATES: state_timeline,
}
_OVERLAID: Final = frozenset({Kind.LINES, Kind.STACK, Kind.EVENTS, Kind.STATES})
"""Kinds whose series name their run, as several runs may be chosen."""
_FORMATS: Final = {
    Kind.HEATMAP: PromQueryFormat.HEATMAP,
    Kind.TABLE: PromQueryFormat.TABLE,
}


class _Annotation(models.AnnotationQuery):
    """An annotation of Prometheus; the library's record lacks the text of its events."""

    def __init__(self, mark: Mark) -> None:
        super().__init__(
            name=mark.name, datasource=_SOURCE, icon_color=mark.color, expr=mark.expression
        )
        self._title = mark.title

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "titleFormat": self._title, "step": _STEP}


def to_grafana(board: Board) -> str:
    """Return the dashboard's JSON, with a line break at its end."""
    builder = (
        builders.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(list(board.tags))
        .time("now-3h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            builders.DashboardLink("VCPO")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["vcpo"])
            .include_vars(True)
            .keep_time(True)
        )
        .variables(list(_variables(board)))
    )
    for row, top in row_tops(board):
        line = models.GridPos(x=0, y=top, w=COLUMNS, h=1)
        builder.with_row(builders.Row(row.question).id(row.id).grid_pos(line))
        for panel, place in places(row, top + 1):
            builder.with_panel(_panel(panel, place))
    built = builder.build()
    built.annotations = models.AnnotationContainer(
        list_val=[_Annotation(mark) for mark in marks(board)]
    )
    return json.dumps(built, cls=JSONEncoder, indent=2) + "\n"


def _panel(panel: Panel, place: Place) -> _PanelBuilder:
    builder = _BUILDERS[panel.kind](panel)
    builder.id(panel.id).title(panel.title).description(f"{panel.question} {panel.reading}")
    builder.datasource(_SOURCE).unit(panel.unit)
    builder.grid_pos(models.GridPos(x=place.x, y=place.y, w=place.width, h=place.height))
    if panel.minimum is not None:
        builder.min(panel.minimum)
    if panel.maximum is not None:
        builder.max(panel.maximum)
    if panel.bands:
        steps = [models.Threshold(value=band.start, color=band.color) for band in panel.bands]
        absolute = builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE)
        builder.thresholds(absolute.steps(steps))
    for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False):
        builder.with_target(_target(panel.kind, letter, query))
    return builder


def _target(kind: Kind, letter: str, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(_SOURCE).ref_id(letter).expr(query.expression)
    legend = query.legend
    if kind in _OVERLAID and "$run" in query.expression:
        legend = f"{legend} {{{{run}}}}"
    target.format(_FORMATS.get(kind, PromQueryFormat.TIME_SERIES)).legend_format(legend)
    return target.instant() if kind in INSTANT else target.range()


def _variables(board: Board) -> list[builders.DatasourceVariable | builders.QueryVariable]:
    source = builders.DatasourceVariable("datasource").label("data source").type("prometheus")
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    cluster = _label_values("cluster", "vcpo_build_info")
    namespace = _label_values("namespace", 'vcpo_run_info{cluster=~"$cluster"}')
    choices = [
        each.include_all(True).all_value(".*").current(everything) for each in (cluster, namespace)
    ]
    if board.has_run:
        choices.append(_label_values("run", f"vcpo_run_info{{{RUNS}}}").multi(True))
    return [source, *choices]


def _label_values(label: str, series: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(label)
        .label(label)
        .datasource(_SOURCE)
        .query({"query": f"label_values({series}, {label})", "refId": label})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
