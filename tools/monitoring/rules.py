"""The chart's rule file for Prometheus: its rules as records."""

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ruamel.yaml import YAML

RULES_FILE: Final = Path(__file__).parents[2] / "charts" / "vcpo" / "files" / "rules.yaml"


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
        for group in YAML(typ="safe").load(RULES_FILE)["groups"]
        for rule in group["rules"]
    )


def limit(alert: str, metric: str) -> float:
    """Return the number with which an alert compares a metric alone; boards draw it.

    Raises: KeyError if the alert does not.
    """
    expressions = [rule.expression for rule in rules() if rule.name == alert]
    found = re.search(rf"\({metric}\) [<>]=? ([0-9.]+)", "\n".join(expressions))
    if found is None:
        raise KeyError(f"{alert}: {metric}")
    return float(found[1])


def threshold(name: str) -> float:
    """Return a number of the file that the chart's values can replace; boards draw it.

    Raises: KeyError if no alert has it.
    """
    found = re.search(rf"([0-9.]+)[,)]* +# threshold {name}\b", RULES_FILE.read_text())
    if found is None:
        raise KeyError(name)
    return float(found[1])
