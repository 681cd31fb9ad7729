"""Panels of Grafana by kind, without title, place and queries: what they look like."""

from __future__ import annotations

import string
from typing import Final

from grafana_foundation_sdk.builders import (
    common,
    heatmap,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode

from tools.monitoring.dashboards.board import STATES, Color, Kind, Panel, Role, Words

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


def time_series(panel: Panel) -> timeseries.Panel:
    """Return lines, a stack or bars over time."""
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


def heat_map(_: Panel) -> heatmap.Panel:
    """Return a heatmap of buckets that Prometheus counted; cells without a count stay empty."""
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges")
    return (
        heatmap.Panel()
        .calculate(False)
        .color(color.exponent(0.5).steps(64))
        .cell_gap(1)
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .max_data_points(_POINTS_OF_COUNTS)
    )


def statistic(panel: Panel) -> stat.Panel:
    """Return newest values as large text, or the names of the series alone."""
    is_names = panel.kind is Kind.NAMES
    text = options.BigValueTextMode.NAME if is_names else options.BigValueTextMode.VALUE_AND_NAME
    return (
        stat.Panel()
        .text_mode(text)
        .color_mode(options.BigValueColorMode.VALUE)
        .graph_mode(options.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def table_of(panel: Panel) -> table.Panel:
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
            thresholds = {"mode": "absolute", "steps": steps}
            colored = (("thresholds", thresholds), _COLORED)
            builder.override_by_name(query.legend, _properties(colored))
        if query.words is not None:
            builder.override_by_name(query.words.label, _properties(_colored_words(query.words)))
    return builder


def _colored_words(words: Words) -> tuple[tuple[str, object], ...]:
    mappings = [
        {
            "type": "regex",
            "options": {
                "pattern": f"({pattern})",
                "result": {"color": color.value, "index": place},
            },
        }
        for place, (pattern, color) in enumerate(words.colors.items())
    ]
    return (("mappings", mappings), _COLORED)


def state_timeline(_: Panel) -> statetimeline.Panel:
    """Return a bar per series that is coloured by its state over time."""
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
