"""Boards as dashboards of Perses, with the variables of one run filled in; for pictures.

Perses has no logarithmic axis: such a panel shows the logarithm and says so on its axis. Its
heatmap draws native histograms only, so `monitoring/perses/buckets.jsx` draws ours. A picture has
no tables, and states are numbers (`board.STATES`).
"""

from __future__ import annotations

from typing import Any, Final

from vcpo_monitoring.dashboards.board import (
    AxisUnit,
    Board,
    Color,
    Kind,
    Panel,
    Role,
    places,
    row_tops,
)
from vcpo_monitoring.dashboards.panel_queries import filled_in

Json = dict[str, Any]

_FORMATS: Final[dict[AxisUnit, Json]] = {
    AxisUnit.SHARE: {"unit": "percent-decimal", "decimalPlaces": 0},
    AxisUnit.SECONDS: {"unit": "seconds"},
    AxisUnit.BYTES: {"unit": "bytes"},
    AxisUnit.BYTES_PER_SECOND: {"unit": "bytes/sec"},
    AxisUnit.PER_SECOND: {"unit": "counts/sec"},
}
_DECIMAL: Final[Json] = {"unit": "decimal", "shortValues": True}
_UNNAMED: Final = {AxisUnit.NUMBER.value, AxisUnit.COUNT.value}
_LOOKS: Final = {
    Kind.HEATMAP: "BucketsChart",
    Kind.NAMES: "NamesChart",
    Kind.STAT: "StatChart",
}
"""Panels of Perses, and those of `monitoring/perses`; all others are time series."""
_COLORS: Final = {Color.WARNING: "#e8961e", Color.BAD: "#d13b3b", Color.GOOD: "#2e9e5b"}
_ROLE_COLORS: Final = {
    Role.REFERENCE: "#6b7280",
    Role.LIMIT: _COLORS[Color.BAD],
    Role.FAINT: "#b9cfe8",
}
_DASHED: Final = {Role.REFERENCE, Role.LIMIT}
_VALUE_COLORS: Final = ("#2f6fbf", "#d9731a", "#4d9a3a", "#7a4fb0", "#0f8f8f", "#a8326b")
"""Of the values of a panel, by their order."""
HEIGHT: Final = 6
"""Height of a panel in a picture, in units of the grid."""
_ROW_PX: Final = 70
_LINE_PX: Final = 238


def to_perses(
    board: Board, *, run: str, namespace: str, interval: str, rows: frozenset[int] = frozenset()
) -> Json:
    """Return the dashboard for one run; see `panel_queries.filled_in` for the arguments.

    rows: ids of the rows to show; empty for all of them.
    """
    panels, layouts = {}, []
    for row, top in row_tops(board):
        if rows and row.id not in rows:
            continue
        items = []
        for panel, place in places(row, top + 1):
            if panel.kind is Kind.TABLE:
                continue
            line = (place.y - top - 1) // place.height
            items.append(
                {
                    "x": place.x,
                    "y": line * HEIGHT,
                    "width": place.width,
                    "height": HEIGHT,
                    "content": {"$ref": f"#/spec/panels/{panel.slug}"},
                }
            )
            fill = {"run": run, "namespace": namespace, "interval": interval}
            panels[panel.slug] = _panel(
                panel, [filled_in(query.expression, **fill) for query in panel.queries]
            )
        display = {"title": row.question, "collapse": {"open": True}}
        layouts.append({"kind": "Grid", "spec": {"display": display, "items": items}})
    return {
        "kind": "Dashboard",
        "metadata": {"name": board.uid, "project": "vcpo", "version": 0},
        "spec": {"panels": panels, "layouts": layouts, "variables": [], "duration": "1h"},
    }


def picture_height(dashboard: Json) -> int:
    """Return the height of a drawn dashboard, in CSS pixels."""
    grids = [layout["spec"]["items"] for layout in dashboard["spec"]["layouts"]]
    lines = sum(len({item["y"] for item in items}) for items in grids)
    return _ROW_PX * len(grids) + _LINE_PX * lines


def _panel(panel: Panel, expressions: list[str]) -> Json:
    queries = []
    for query, expression in zip(panel.queries, expressions, strict=True):
        text = f"log10({expression})" if panel.is_logarithmic else expression
        spec = {"query": text, "seriesNameFormat": query.legend}
        plugin = {"kind": "PrometheusTimeSeriesQuery", "spec": spec}
        queries.append({"kind": "TimeSeriesQuery", "spec": {"plugin": plugin}})
    look = _LOOKS.get(panel.kind)
    plugin = {"kind": look, "spec": {}} if look else _time_series(panel)
    if panel.kind is Kind.STAT:
        plugin["spec"] = {"calculation": "last-number", "format": _DECIMAL}
    display = {"name": panel.title, "description": panel.question}
    return {"kind": "Panel", "spec": {"display": display, "plugin": plugin, "queries": queries}}


def _time_series(panel: Panel) -> Json:
    bars = panel.kind is Kind.EVENTS
    area = 0.5 if bars or panel.kind is Kind.STACK else 0.0
    values = [query for query in panel.queries if query.role is Role.VALUE]
    spec: Json = {
        "legend": {"position": "bottom", "mode": "list"},
        "yAxis": _axis(panel),
        "visual": {
            "display": "bar" if bars else "line",
            "lineWidth": 1.75,
            "areaOpacity": area,
            "stack": "all" if area else "none",
            "palette": {"mode": "auto"},
        },
        "querySettings": [
            {
                "queryIndex": number,
                "colorMode": "fixed-single",
                "colorValue": _ROLE_COLORS.get(query.role)
                or _VALUE_COLORS[values.index(query) % len(_VALUE_COLORS)],
                "lineStyle": "dashed" if query.role in _DASHED else "solid",
                "areaOpacity": area,
            }
            for number, query in enumerate(panel.queries)
            if "{{" not in query.legend
        ],
    }
    steps = [(band.start, _COLORS[band.color]) for band in panel.bands if band.start is not None]
    if steps:
        listed = [{"value": start, "color": color} for start, color in steps]
        spec["thresholds"] = {"mode": "absolute", "steps": listed}
    return {"kind": "TimeSeriesChart", "spec": spec}


def _axis(panel: Panel) -> Json:
    unit = "" if panel.unit in _FORMATS else panel.unit.value.removeprefix("suffix: ")
    words = ["log10" if panel.is_logarithmic else "", unit if unit not in _UNNAMED else ""]
    label = " ".join(word for word in words if word)
    ends = {"min": panel.minimum, "max": panel.maximum}
    return {
        "show": True,
        "format": _FORMATS.get(panel.unit, _DECIMAL),
        **({"label": label} if label else {}),
        **{name: end for name, end in ends.items() if end is not None},
    }
