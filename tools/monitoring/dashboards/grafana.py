"""Boards as dashboards of Grafana 11 or newer: JSON that a sidecar or a person can import.

The data source, the cluster, the namespace and the run are variables. `All` namespaces is `.*`,
because the series of a local run have no namespace.
"""

import json
from collections.abc import Iterator, Sequence
from string import ascii_uppercase
from typing import Any, Final, NamedTuple

from tools.monitoring.dashboards.board import (
    COLUMNS,
    INSTANT,
    STATES,
    Band,
    Board,
    Color,
    Kind,
    Panel,
    Role,
)
from tools.monitoring.dashboards.promql import OPERATOR, RUN, RUNS, increase, selector, value

_Json = dict[str, Any]
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_STEP: Final = "30s"
"""Least time between two points of a mark."""
_HEIGHT: Final = 8
_OVERLAID: Final = frozenset({Kind.LINES, Kind.STACK, Kind.EVENTS, Kind.STATES})
"""Kinds whose series name their run, as several runs may be chosen."""
_FORMATS: Final = {Kind.HEATMAP: "heatmap", Kind.TABLE: "table"}
_TYPES: Final = {
    **dict.fromkeys((Kind.LINES, Kind.STACK, Kind.EVENTS), "timeseries"),
    Kind.STATES: "state-timeline",
}
"""Grafana's name of a kind, where it is another."""


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
        ("color", {"mode": "fixed", "fixedColor": Color.BAD}),
    ),
}
_LEGEND: Final = {"displayMode": "list", "placement": "bottom"}
_LAST: Final = {"calcs": ["lastNotNull"]}
_LINES: Final = {
    "legend": {**_LEGEND, "showLegend": True, **_LAST},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
_SHADES: Final = {"scheme": "Oranges", "fill": "", "exponent": 0.5, "steps": 64, "reverse": False}
_HEATMAP: Final = {
    "color": {**_SHADES, "mode": "scheme"},
    "showValue": "auto",
    "yAxis": {},
    "legend": {"show": True},
    "tooltip": {"mode": "single"},
    "exemplars": {"color": "rgba(255,0,255,0.7)"},
} | {"calculate": False, "filterValues": {"le": 1e-9}, "cellGap": 1, "selectionMode": "x"}
_BARE: Final = {"graphMode": "none", "colorMode": "value", "justifyMode": "auto"}
_NAMED: Final = {"textMode": "value_and_name", "wideLayout": True, "showPercentChange": False}
_ENDS: Final = {"percentChangeColorMode": "standard", "orientation": "auto"}
_BAR_LEGEND: Final = {"legend": {**_LEGEND, "showLegend": False, "calcs": []}}
_BARS: Final = {"showValue": "auto", "rowHeight": 0.9} | _BAR_LEGEND
_MERGED: Final = {"mergeValues": True, "alignValue": "left", "perPage": 20}
_OPTIONS: Final[dict[Kind, _Json]] = {
    **dict.fromkeys((Kind.LINES, Kind.STACK, Kind.EVENTS), _LINES),
    Kind.HEATMAP: _HEATMAP,
    Kind.STAT: {**_BARE, **_NAMED, "reduceOptions": _LAST, **_ENDS},
    Kind.STATES: {**_BARS, "tooltip": {"mode": "single", "sort": "asc"}, **_MERGED},
}


def to_grafana(board: Board) -> str:
    """Return the dashboard's JSON, with a line break at its end."""
    link = {"title": "VCPO", "type": "dashboards", "icon": "", "tooltip": "", "tags": ["vcpo"]}
    leads = {"asDropdown": False, "targetBlank": False, "includeVars": True, "keepTime": True}
    events = [_annotation(mark) for mark in marks(board)]
    lists = {"templating": {"list": list(_variables(board))}, "annotations": {"list": events}}
    named = {"uid": board.uid, "title": board.title, "description": board.description}
    shown = {"tags": list(board.tags), "timezone": "browser", "editable": True, "graphTooltip": 1}
    times = {"time": {"from": "now-3h", "to": "now"}, "fiscalYearStartMonth": 0, "refresh": "30s"}
    parts = {"panels": list(_panels(board)), "links": [link | leads]}
    document = {"schemaVersion": 41, **lists, **named, **shown, **times, **parts}
    return json.dumps(document, indent=2) + "\n"


def _annotation(mark: Mark) -> _Json:
    shown = {"enable": True, "iconColor": mark.color, "hide": False, "builtIn": 0}
    asked = {"expr": mark.expression, "titleFormat": mark.title, "step": _STEP}
    return {"name": mark.name, "datasource": _SOURCE, **shown, **asked}


def _panels(board: Board) -> Iterator[_Json]:
    """Yield the rows and their panels: two side by side, or one alone."""
    top = 0
    for row in board.rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        head = {"type": "row", "collapsed": False, "id": row.id, "panels": []}
        yield head | {"title": row.question, "gridPos": place}
        top, left = top + 1, 0
        for panel in row.panels:
            is_alone = panel.kind is Kind.TABLE or len(row.panels) == 1
            width = COLUMNS if is_alone else COLUMNS // 2
            if left + width > COLUMNS:
                top, left = top + _HEIGHT, 0
            yield _panel(panel, {"h": _HEIGHT, "w": width, "x": left, "y": top})
            left += width
        top += _HEIGHT


def _panel(panel: Panel, place: _Json) -> _Json:
    kind, targets = _TYPES.get(panel.kind, panel.kind), list(_targets(panel))
    found: _Json = {"type": kind, "id": panel.id, "targets": targets, "title": panel.title}
    found |= {"description": panel.text, "transparent": False, "datasource": _SOURCE}
    found |= {"gridPos": place, "repeatDirection": "h"}
    if panel.kind in {Kind.HEATMAP, Kind.EVENTS}:
        found["maxDataPoints"] = _POINTS_OF_COUNTS
    if panel.kind is Kind.TABLE:
        found["transformations"] = _transformations(panel)
    else:
        found["options"] = _OPTIONS[panel.kind]
    overrides = _column_styles(panel) if panel.kind is Kind.TABLE else _line_styles(panel)
    return found | {"fieldConfig": {"defaults": _defaults(panel), "overrides": list(overrides)}}


def _targets(panel: Panel) -> Iterator[_Json]:
    is_instant = panel.kind in INSTANT
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        is_overlaid = panel.kind in _OVERLAID and "$run" in query.expression
        legend = f"{query.legend} {{{{run}}}}" if is_overlaid else query.legend
        asked = {"expr": query.expression, "refId": letter, "instant": is_instant}
        shape = {"range": not is_instant, "format": _FORMATS.get(panel.kind, "time_series")}
        yield {**asked, **shape, "legendFormat": legend, "datasource": _SOURCE}


def _defaults(panel: Panel) -> _Json:
    """Return the unit, ends, colours and lines of a panel."""
    ends = {"min": panel.minimum, "max": panel.maximum}
    found: _Json = {"unit": panel.unit}
    found |= {name: end for name, end in ends.items() if end is not None}
    if panel.bands:
        found["thresholds"] = _thresholds(panel.bands)
    if panel.kind is Kind.STATES:
        texts = {
            str(state): {"text": text, "color": color} for state, (text, color) in STATES.items()
        }
        found["mappings"] = [{"type": "value", "options": texts}]
        found["custom"] = {"lineWidth": 0, "fillOpacity": 80}
    elif panel.kind in _OVERLAID:
        found["custom"] = _custom(panel)
    return found


def _custom(panel: Panel) -> _Json:
    """Return how a time series is drawn."""
    width, opacity = {Kind.STACK: (0, 60), Kind.EVENTS: (0, 80)}.get(panel.kind, (2, 8))
    found: _Json = {"drawStyle": "bars"} if panel.kind is Kind.EVENTS else {}
    if panel.bands:
        found["thresholdsStyle"] = {"mode": "dashed+area"}
    found |= {"lineWidth": width, "fillOpacity": opacity, "showPoints": "never"}
    if panel.is_logarithmic:
        found["scaleDistribution"] = {"type": "log", "log": 10}
    if panel.kind is Kind.STACK:
        found["stacking"] = {"mode": "normal", "group": "A"}
    return found


def _thresholds(bands: Sequence[Band]) -> _Json:
    steps = [{"value": band.start, "color": band.color} for band in bands]
    return {"mode": "absolute", "steps": steps}


def _override(matcher: str, name: str, *properties: tuple[str, object]) -> _Json:
    found = [{"id": each, "value": content} for each, content in properties]
    return {"matcher": {"id": matcher, "options": name}, "properties": found}


def _line_styles(panel: Panel) -> Iterator[_Json]:
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        if properties := _ROLE_STYLES.get(query.role):
            yield _override("byFrameRefID", letter, *properties)


def _transformations(panel: Panel) -> list[_Json]:
    """Make a row per set of labels, with the queries' values as columns.

    A query without a legend has no column of values; its labels are columns like those of others.
    """
    queries = zip(ascii_uppercase, panel.queries, strict=False)
    names = {f"Value #{letter}": query.legend for letter, query in queries}
    hidden = {"Time": True} | {name: True for name, legend in names.items() if not legend}
    renamed = {name: legend for name, legend in names.items() if legend}
    organized = {"excludeByName": hidden, "renameByName": renamed}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": organized}]


def _column_styles(panel: Panel) -> Iterator[_Json]:
    yield _override("byName", "run", ("links", [_RUN_LINK]))
    for query in panel.queries:
        if query.unit is not None:
            yield _override("byName", query.legend, ("unit", query.unit))
        if query.bands:
            colors = ("thresholds", _thresholds(query.bands))
            yield _override("byName", query.legend, colors, _COLORED)
        if query.words is not None:
            words = [_mapping(*each) for each in enumerate(query.words.colors.items())]
            yield _override("byName", query.words.label, ("mappings", words), _COLORED)


def _mapping(place: int, word: tuple[str, Color]) -> _Json:
    result = {"color": word[1], "index": place}
    return {"type": "regex", "options": {"pattern": f"({word[0]})", "result": result}}


def _variables(board: Board) -> Iterator[_Json]:
    tail = {"auto": False, "auto_min": "10s", "auto_count": 30}
    head: _Json = {"type": "datasource", "name": "datasource", "label": "data source"}
    lists = {"multi": False, "allowCustomValue": True, "includeAll": False}
    yield {**head, "skipUrlSync": False, "query": "prometheus", **lists, **tail}
    everything = {"current": {"text": "All", "value": "$__all", "selected": True}}
    series = {"cluster": "vcpo_build_info", "namespace": 'vcpo_run_info{cluster=~"$cluster"}'}
    if board.has_run:
        series["run"] = f"vcpo_run_info{{{RUNS}}}"
    for name, source in series.items():
        is_run = name == "run"
        query = {"query": f"label_values({source}, {name})", "refId": name}
        head = {"type": "query", "name": name, "label": name, "skipUrlSync": False, "query": query}
        chosen = {} if is_run else everything
        many = {"multi": is_run, "allowCustomValue": True, "refresh": 2, "sort": 1}
        all_values = {"includeAll": not is_run} | ({} if is_run else {"allValue": ".*"})
        yield {**head, "datasource": _SOURCE, **chosen, **many, **all_values, **tail}
