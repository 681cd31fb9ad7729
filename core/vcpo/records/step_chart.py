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
