"""The chart's rule file for Prometheus: its rules as records, and the same rules in faster time."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

RULES_FILE: Final = Path(__file__).parents[2] / "charts" / "vcpo" / "files" / "rules.yaml"

_SMALLEST_RANGE_SCRAPES = 4
"""What `rate` and its kind need."""
_UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}
_DURATION = r"((?:\d+(?:ms|[smhdw]))+)"
_RANGE = re.compile(rf"\[{_DURATION}\]")
_OFFSET = re.compile(rf"\boffset {_DURATION}")
_THRESHOLD = re.compile(r"([0-9.]+)([,)]*) +# threshold (\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of the file."""

    name: str
    """Of the alert, or of the recorded series."""
    expression: str
    is_alert: bool
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Return every rule in the order of the file; an alert with two severities is there twice."""
    return tuple(
        Rule(
            name=rule.get("alert") or rule["record"],
            expression=rule["expr"],
            is_alert="alert" in rule,
            labels=rule.get("labels", {}),
            annotations=rule.get("annotations", {}),
        )
        for group in _document()["groups"]
        for rule in group["rules"]
    )


def thresholds() -> dict[str, float]:
    """Return the numbers of the file that the chart's values can replace, by name.

    Raises: ValueError if a name stands at two different numbers.
    """
    found: dict[str, float] = {}
    for number, _, name in _THRESHOLD.findall(RULES_FILE.read_text()):
        if found.setdefault(name, float(number)) != float(number):
            raise ValueError(f"threshold {name} is {found[name]:g} and {number} in {RULES_FILE}")
    return found


def rules_of_alert(name: str) -> str:
    """Return a file with one alert, and with the recordings that it needs; as JSON, which is YAML.

    Raises: KeyError if there is no such alert.
    """
    document = _document()
    listed = [rule for group in document["groups"] for rule in group["rules"]]
    kept = [rule for rule in listed if rule.get("alert") == name]
    if not kept:
        raise KeyError(name)
    for rule in reversed(listed):
        needed = "\n".join(each["expr"] for each in kept)
        if "record" in rule and re.search(rf"{rule['record']}\b", needed):
            kept.insert(0, rule)
    return json.dumps({"groups": [{"name": name, "rules": kept}]}, indent=2)


def scaled_rules(factor: float, *, scrape_interval_ms: int = 1_000) -> str:
    """Return the file with every duration multiplied by a factor, for a test against a fast run.

    Scaled are `for`, offsets, ranges, which keep at least four scrapes, and thresholds in seconds.
    Groups are evaluated once per scrape. Names of series and texts stay: `rate5m` is then of a
    shorter time.

    factor: above 0, such as 1/20.
    """
    smallest_range_ms = _SMALLEST_RANGE_SCRAPES * scrape_interval_ms
    document = _document()
    for group in document["groups"]:
        group["interval"] = f"{scrape_interval_ms}ms"
        for rule in group["rules"]:
            rule["expr"] = _scaled_expression(rule["expr"], factor, smallest_range_ms)
            for key in ("for", "keep_firing_for"):
                if key in rule:
                    rule[key] = _scaled(rule[key], factor)
    return json.dumps(document, indent=2)  # which is YAML as well


def _document() -> dict[str, Any]:
    document: dict[str, Any] = YAML(typ="safe").load(RULES_FILE)
    return document


def _scaled_expression(expression: str, factor: float, smallest_range_ms: int) -> str:
    ranges = _RANGE.sub(
        lambda match: f"[{_scaled(match[1], factor, at_least_ms=smallest_range_ms)}]", expression
    )
    offsets = _OFFSET.sub(lambda match: f"offset {_scaled(match[1], factor)}", ranges)
    return _THRESHOLD.sub(lambda match: _scaled_threshold(match, factor), offsets)


def _scaled_threshold(match: re.Match[str], factor: float) -> str:
    number, closing, name = match.groups()
    if not name.endswith("Seconds"):
        return match[0]
    return f"{float(number) * factor:g}{closing}  # threshold {name}"


def _scaled(duration: str, factor: float, *, at_least_ms: int = 0) -> str:
    """Return a duration of Prometheus times a factor, in whole milliseconds."""
    parts = re.findall(r"(\d+)(ms|[smhdw])", duration)
    total_ms = sum(int(number) * _UNITS_MS[unit] for number, unit in parts)
    return f"{max(round(total_ms * factor), at_least_ms)}ms"
