"""The data of a page's charts as plain JSON, which the page's script draws.

A table of many rows is thinned to buckets of equally many rows. Each column then has the lowest and
the highest value of every bucket, so no spike is lost; a smoothed column has its mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vcpo.report.charts.chart import Chart, Curve, Heatmap, Mark, Table
from vcpo.report.charts.series import Column, highs, lows, means, rows_per_bucket

MAX_ROWS = 1000
"""Largest number of rows that are drawn of a table; a screen has few more pixels."""

Payload = dict[str, Any]
"""Plain JSON."""


def payload_of(
    tables: Sequence[Table],
    charts: Iterable[Chart],
    marks: Sequence[Mark] = (),
) -> Payload:
    """Return the data of charts; every curve refers to one of the tables by its name."""
    bucket_rows = {
        table.name: rows_per_bucket(len(table.steps), limit=MAX_ROWS) for table in tables
    }
    return {
        "tables": {table.name: _table(table, bucket_rows[table.name]) for table in tables},
        "charts": [_chart(chart, bucket_rows) for chart in charts],
        "marks": [_marks(label, marks) for label in sorted({mark.label for mark in marks})],
    }


def _marks(label: str, marks: Sequence[Mark]) -> Payload:
    """Return the marks of one label; a run may have thousands of them."""
    alike = [mark for mark in marks if mark.label == label]
    return {
        "label": label,
        "step": [mark.step for mark in alike],
        "time": [round(mark.time_s, 1) for mark in alike],
    }


def _table(table: Table, rows: int) -> Payload:
    return {
        "rows": rows,
        "step": table.steps[::rows],
        "time": [round(time_s, 1) for time_s in table.times_s[::rows]],
    }


def _chart(chart: Chart, bucket_rows: Mapping[str, int]) -> Payload:
    heatmap = chart.heatmap
    return {
        "name": chart.name,
        "title": chart.title,
        "low": chart.low,
        "high": chart.high,
        "whole": chart.is_whole,
        "log": chart.is_log,
        "bands": [
            {"low": each.low, "high": each.high, "level": each.level} for each in chart.bands
        ],
        "curves": [_curve(curve, bucket_rows[curve.table]) for curve in chart.curves],
        "heatmap": None if heatmap is None else _heatmap(heatmap, bucket_rows[heatmap.table]),
    }


def _curve(curve: Curve, rows: int) -> Payload:
    head = {
        "label": curve.label,
        "ink": curve.ink.value,
        "style": curve.style.value,
        "table": curve.table,
    }
    if rows == 1:
        return {**head, "low": _numbers(curve.values)}
    if curve.is_smooth:
        return {**head, "low": _numbers(means(curve.values, rows=rows))}
    return {
        **head,
        "low": _numbers(lows(curve.values, rows=rows)),
        "high": _numbers(highs(curve.values, rows=rows)),
    }


def _heatmap(heatmap: Heatmap, rows: int) -> Payload:
    """Return the cells; a bucket of rows shows its lowest value, because that one is the news."""
    return {
        "table": heatmap.table,
        "categories": heatmap.categories,
        "cells": [
            [None if cell is None else round(cell, 2) for cell in lows(cells, rows=rows)]
            for cells in heatmap.cells
        ],
    }


def _numbers(values: Column) -> list[float | None]:
    return [None if value is None else _short(value) for value in values]


def _short(value: float) -> float:
    """Round to five significant digits, so that the page stays small; counts stay exact."""
    return int(value) if value == int(value) else float(f"{value:.5g}")
