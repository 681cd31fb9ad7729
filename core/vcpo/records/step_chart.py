"""How the report draws a number of a step, declared beside the number in the step record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ChartTopic(StrEnum):
    """Question that a chart helps to answer; the report shows the charts of a topic together."""

    OFF_POLICY = "How far off policy"
    UPDATE = "What makes the update"
    SPEED = "Speed and responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChart:
    """A small chart of the report that draws one number over all steps."""

    topic: ChartTopic
    title: str
    unit: str
    """Unit of the vertical axis, in words."""
    caption: str
    """How to read the curve: one sentence."""
    label: str
    """Name of the curve in the legend."""
    entry: str | None = None
    """Key of the number within its field, where the field is a mapping."""
    is_noisy: bool = True
    """Whether the report draws a smoothed curve in front of the values."""
    is_whole: bool = False
    """Whether the number is a count."""
    is_signed: bool = False
    """Whether the number may be below 0."""
    is_log: bool = False
    """Whether the vertical axis is logarithmic; values of at most 0 are gaps on it."""
    is_of_update: bool = False
    """Whether only steps that made an update have it."""
    is_of_weights: bool = False
    """Whether only steps whose importance weights all have a value have it."""


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


class Unit(StrEnum):
    """What a number counts or measures in; the plural where it is a count of things."""

    SECONDS = "seconds"
    UNIX_SECONDS = "seconds since 1970"
    BYTES = "bytes"
    RATIO = "ratio"
    """Mostly in 0 to 1."""
    NATS = "nats"
    TOKENS = "tokens"
    STEPS = "steps"
    """Optimizer steps, which are policy versions."""
    VERSIONS = "policy versions"
    TRAJECTORIES = "trajectories"
    REWARD = "reward"
    WEIGHT = "importance weight"
    NORM = "L2 norm"
    RATE = "learning rate"
    COUNT = "count"
    """The number of the things that the name says."""
    FLAG = "0 or 1"
