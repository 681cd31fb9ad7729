"""Which metric and signal carry a number of a step, declared beside the number in the record."""

from __future__ import annotations

from dataclasses import dataclass

from vcpo.records.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGauge:
    """The metric that holds a number of the last step."""

    name: str
    """Name of the metric; see `vcpo.metrics.catalogue` for the rules."""
    help: str
    """One sentence: what it measures, and its unit where the name does not say it."""
    unit: Unit | None = None
    """Unit of the number; None where the name ends in it."""
    entry: str | None = None
    """Key of the number within its field, where the field is a mapping."""
    is_of_update: bool = False
    """Whether only steps that made an update have it; a skipped step leaves the value as it is."""
    is_of_weights: bool = False
    """Whether only steps whose importance weights all have a value have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSignal:
    """The field of the same name in the message `Signals` of `control.proto`."""

    is_of_update: bool = False
    """Whether signals carry the value of the last step that made an update."""
