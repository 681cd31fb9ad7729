"""Where the chart's dashboards and alerts use each metric."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.monitoring.rules import rules

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_OF_HISTOGRAM: Final = ("_bucket", "_count", "_sum")
DASHBOARDS: Final = Path(__file__).parents[2] / "charts" / "vcpo" / "files" / "dashboards"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricUsage:
    """What uses one metric, directly or through recorded series."""

    alerts: tuple[str, ...] = ()
    """Names of alerts, in alphabetical order."""
    boards: tuple[str, ...] = ()
    """Identifiers of dashboards, in alphabetical order."""


def metric_usage(names: frozenset[str]) -> Mapping[str, MetricUsage]:
    """Return the use of each of these metrics; the name of a histogram is without its suffix."""
    recorded = {rule.name: rule.expression for rule in rules() if not rule.is_alert}
    alerts, boards = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for rule in rules():
        for used in _metrics(rule.expression, recorded) if rule.is_alert else ():
            alerts[used].add(rule.name)
    for path in DASHBOARDS.glob("*.json"):
        for expression in _expressions(json.loads(path.read_text(encoding="utf-8"))):
            for used in _metrics(expression, recorded):
                boards[used].add(path.stem)
    return {
        name: MetricUsage(alerts=tuple(sorted(alerts[name])), boards=tuple(sorted(boards[name])))
        for name in names
    }


def _metrics(expression: str, recorded: Mapping[str, str]) -> Iterator[str]:
    """Yield the metrics that an expression reads; those of recorded series in their place."""
    for name in names_in(expression):
        if name in recorded:
            yield from _metrics(recorded[name], recorded)
        else:
            yield name


def _expressions(node: Any) -> Iterator[str]:
    """Yield the queries of a dashboard: panels, annotations and variables."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in {"expr", "query"} and isinstance(value, str):
                yield value
            else:
                yield from _expressions(value)
    elif isinstance(node, list):
        for each in node:
            yield from _expressions(each)


def names_in(expression: str) -> frozenset[str]:
    """Return every word of an expression, among them its series; of `x_bucket` also `x`."""
    words = set(_NAME.findall(expression))
    families = {word.removesuffix(end) for word in words for end in _OF_HISTOGRAM}
    return frozenset(words | families)
