"""The checks in their order, and how one runs: in a process of its own, up to a time limit."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.gpu.setting import Figures, Setting
from benchmarks.harness.apart import run_apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question."""

    number: int
    name: str
    place: str
    """MODULE:FUNCTION, imported where it runs."""

    def load(self) -> Callable[[Setting], Figures]:
        """Import the function."""
        module, _, function = self.place.partition(":")
        found: Callable[[Setting], Figures] = getattr(importlib.import_module(module), function)
        return found


_PLACES = (
    ("norm_products", "norm_forms:norm_products"),
    ("output_head", "head:output_head"),
    ("step_speed", "steps:step_speed"),
    ("step_beside_trl", "steps:step_beside_trl"),
    ("attention", "steps:attention"),
    ("longest_trajectory", "steps:longest_trajectory"),
    ("break_even", "norm_forms:break_even"),
    ("sharded_step", "sharding:sharded_step"),
    ("publishing", "publishing:publishing"),
    ("swap_pauses", "sampling:swap_pauses"),
    ("sampler_against_learner", "sampling:sampler_against_learner"),
    ("whole_run", "end_to_end:whole_run"),
)
CHECKS: Final = tuple(
    Check(number=number, name=name, place=f"benchmarks.gpu.{place}")
    for number, (name, place) in enumerate(_PLACES, start=1)
)
"""In the order of their weight: a run that is cut short has answered the first ones."""

ENVIRONMENT: Final = Check(
    number=0, name="environment", place="benchmarks.gpu.environment:environment"
)
"""What the machine has; it runs apart as well, as it touches the device."""


def run_check(check: Check, setting: Setting, limit_s: float) -> dict[str, Any]:
    """Run a check in a process of its own; return its line, complete or as far as it came.

    limit_s: after this many seconds the process and its children are killed.
    """
    line = {"check": check.number, "name": check.name}
    return line | run_apart(lambda: check.load()(setting), limit_s)
