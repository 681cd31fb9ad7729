"""Boards as dashboards of Grafana 11 or newer: JSON that a sidecar or a person can import.

The data source, the cluster, the namespace and the run are variables. `All` namespaces is `.*`,
because the series of a local run have no namespace.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from grafana_foundation_sdk.builders import (
    common,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from tools.monitoring.dashboards.board import (
    COLUMNS,
    INSTANT,
    STATES,
    Board,
    Color,
    Kind,
    Panel,
    Query,
    Role,
)
from tools.monitoring.dashboards.promql import OPERATOR, RUN, RUNS, increase, selector, value

_SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_STEP: Final = "30s"
"""Least time between two points of a mark."""

_OVERLAID: Final = frozenset({Kind.LINES, Kind.STACK, Kind.EVENTS, Kind.STATES})
"""Kinds whose series name their run, as several runs may be chosen."""
_FORMATS: Final = {Kind.HEATMAP: PromQueryFormat.HEATMAP, Kind.TABLE: PromQueryFormat.TABLE}


class Mark(NamedTuple):
    """A kind of event that boards draw over their panels; it lasts while its query has a series."""

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
    critical = value("vcpo_critical_steps_in_a_row", scope=scope)
    rollbacks = f"{selector('vcpo_learner_rollbacks', scope=scope)}[$__rate_interval]"
    rolled = f"max by (namespace, run) (delta({rollbacks})) > 0"
    firing = selector("ALERTS", 'alertname=~"VCPO.*",alertstate="firing"', alerts)
    return (
        Mark("Throttles", f"{throttles} > 0", "{{run}}: lag limit, {{direction}}", Color.WARNING),
        Mark("Restarts", f"{restarts} > 0", "{{run}}: learner restarted", Color.NEUTRAL),
        Mark("Critical", f"{critical} > 0", "{{run}}: early warning critical", Color.BAD),
        Mark("Rollbacks", rolled, "{{run}}: rolled back", Color.BAD),
        Mark("Alerts", firing, "{{run}} {{alertname}}", Color.BAD),
    )


_POINTS_OF_COUNTS: Final = 100
"""Points of a panel that counts events, which come seconds to minutes apart."""
_DASHES: Final = ("custom.lineStyle", {"fill": "dash", "dash": [8, 6]})
_UNFILLED: Final = ("custom.fillOpacity", 0)
_COLORED: Final = ("custom.cellOptions", {"type": "color-background", "mode": "basic"})
_RUN_LINK: Final = {
    "title": "Board of this run",
    "url": "/d/vcpo-run?var-namespace=${__data.fields.namespace}&var-run=${__value.text}",
}
_ROLE_STYLES: Final[dict[Role, tuple[tuple[str, object], ...]]] = {
    Role.FAINT: (("custom.lineWidth", 1), _UNFILLED),
    Role.REFERENCE: (_DASHES, _UNFILLED, ("color", {"mode": "fixed", "fixedColor": "text"})),
    Role.LIMIT: (
        _DASHES,
        _UNFILLED,
        ("custom.lineWidth", 1),
        ("custom.stacking", {"mode": "none", "group": "A"}),
        ("color", {"mode": "fixed", "fixedColor": Color.BAD.value}),
    ),
}


def _time_series(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .line_width(2)
        .fill_opacity(8)
        .show_points(options.VisibilityMode.NEVER)
        .tooltip(
            common.VizTooltipOptions()
            .mode(options.TooltipDisplayMode.MULTI)
            .sort(options.SortOrder.DESCENDING)
        )
        .legend(
            common.VizLegendOptions()
            .display_mode(options.LegendDisplayMode.LIST)
            .placement(options.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull"])
        )
    )
    if panel.kind is Kind.STACK:
        stack = common.StackingConfig().mode(options.StackingMode.NORMAL).group("A")
        builder.stacking(stack).fill_opacity(60).line_width(0)
    if panel.kind is Kind.EVENTS:
        builder.draw_style(options.GraphDrawStyle.BARS).fill_opacity(80).line_width(0)
        builder.max_data_points(_POINTS_OF_COUNTS)
    if panel.is_logarithmic:
        logarithm = common.ScaleDistributionConfig().type(options.ScaleDistribution.LOG).log(10)
        builder.scale_distribution(logarithm)
    if panel.bands:
        style = common.GraphThresholdsStyleConfig()
        builder.thresholds_style(style.mode(options.GraphThresholdsStyleMode.DASHED_AND_AREA))
    for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False):
        if properties := _ROLE_STYLES.get(query.role):
            builder.override_by_query(letter, _properties(properties))
    return builder


def _properties(pairs: tuple[tuple[str, object], ...]) -> list[models.DynamicConfigValue]:
    return [models.DynamicConfigValue(id_val=name, value=each) for name, each in pairs]


def _heat_map(_: Panel) -> heatmap.Panel:
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges")
    return (
        heatmap.Panel()
        .calculate(False)
        .color(color.exponent(0.5).steps(64))
        .cell_gap(1)
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .max_data_points(_POINTS_OF_COUNTS)
    )


def _statistic(_: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .text_mode(options.BigValueTextMode.VALUE_AND_NAME)
        .color_mode(options.BigValueColorMode.VALUE)
        .graph_mode(options.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _table_of(panel: Panel) -> table.Panel:
    """Return a table with a row per set of labels and the queries' values as columns.

    A query without a legend has no column of values; its labels are columns like those of others.
    """
    names = {
        f"Value #{letter}": query.legend
        for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False)
    }
    hidden = {"Time": True} | {name: True for name, legend in names.items() if not legend}
    renamed = {name: legend for name, legend in names.items() if legend}
    builder = (
        table.Panel()
        .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            models.DataTransformerConfig(
                id_val="organize", options={"excludeByName": hidden, "renameByName": renamed}
            )
        )
    )
    builder.override_by_name("run", _properties((("links", [_RUN_LINK]),)))
    for query in panel.queries:
        if query.unit is not None:
            builder.override_by_name(query.legend, _properties((("unit", query.unit.value),)))
        if query.bands:
            steps = [{"value": band.start, "color": band.color.value} for band in query.bands]
            colored = (("thresholds", {"mode": "absolute", "steps": steps}), _COLORED)
            builder.override_by_name(query.legend, _properties(colored))
        if query.words is not None:
            mappings = [_mapping(*each) for each in enumerate(query.words.colors.items())]
            words = _properties((("mappings", mappings), _COLORED))
            builder.override_by_name(query.words.label, words)
    return builder


def _mapping(place: int, word: tuple[str, Color]) -> dict[str, object]:
    result = {"color": word[1].value, "index": place}
    return {"type": "regex", "options": {"pattern": f"({word[0]})", "result": result}}


def _state_timeline(_: Panel) -> statetimeline.Panel:
    texts = {
        str(state): models.ValueMappingResult(text=text, color=color)
        for state, (text, color) in STATES.items()
    }
    return (
        statetimeline.Panel()
        .mappings([models.ValueMap(options=texts)])
        .line_width(0)
        .fill_opacity(80)
        .legend(common.VizLegendOptions().show_legend(False))
    )


_PanelBuilder: TypeAlias = (
    timeseries.Panel | heatmap.Panel | stat.Panel | table.Panel | statetimeline.Panel
)
_BUILDERS: Final[dict[Kind, Callable[[Panel], _PanelBuilder]]] = {
    Kind.LINES: _time_series,
    Kind.STACK: _time_series,
    Kind.EVENTS: _time_series,
    Kind.HEATMAP: _heat_map,
    Kind.STAT: _statistic,
    Kind.TABLE: _table_of,
    Kind.STATES: _state_timeline,
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
    for row in board.rows:
        builder.with_row(builders.Row(row.question).id(row.id))
        for panel in row.panels:
            is_alone = panel.kind is Kind.TABLE or len(row.panels) == 1
            builder.with_panel(_panel(panel).span(COLUMNS if is_alone else COLUMNS // 2).height(8))
    built = builder.build()
    built.annotations = models.AnnotationContainer(
        list_val=[_Annotation(mark) for mark in marks(board)]
    )
    return json.dumps(built, cls=JSONEncoder, indent=2) + "\n"


def _panel(panel: Panel) -> _PanelBuilder:
    builder = _BUILDERS[panel.kind](panel)
    builder.id(panel.id).title(panel.title).description(panel.text)
    builder.datasource(_SOURCE).unit(panel.unit)
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
