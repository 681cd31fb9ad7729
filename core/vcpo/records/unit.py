"""Units of the project's numbers, as metrics, documents and boards write them."""

from __future__ import annotations

from enum import StrEnum


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
