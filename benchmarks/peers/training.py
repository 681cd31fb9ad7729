"""What both sides train, and what a training took to a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
MODEL: Final = ROOT / "examples" / "models" / "tiny"
TASK: Final = "sort_digits"
PARAMETERS: Final = {"digits": 5, "style": "plain"}
PROMPTS, RESPONSES, NEW_TOKENS = 16, 8, 16
RATE: Final = 1e-4
_WINDOW: Final = 5
"""Steps over which a reward is a mean: a batch alone is noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step."""

    reward: float
    """Mean of its batch."""
    seconds: float
    """Since the first step ended; what starts a training is not compared."""
    cpu_seconds: float
    """Of all processes, since then."""
    peak_gibibytes: float
    """Of all processes together."""


def steps_to(steps: Sequence[Step], reward: float) -> int | None:
    """Return after how many steps the mean of the last few first reached a reward."""
    for number in range(_WINDOW, len(steps) + 1):
        window = steps[number - _WINDOW : number]
        if sum(step.reward for step in window) / _WINDOW >= reward:
            return number
    return None


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """Return what a training took to both rewards, and where it ended."""
    found: dict[str, Any] = {}
    for reward in (0.9, 0.95):
        number = steps_to(steps, reward)
        last = None if number is None else steps[number - 1]
        found[f"to_{reward:g}"] = {
            "steps": number,
            "seconds": last and round(last.seconds, 1),
            "cpu_seconds": last and round(last.cpu_seconds, 1),
        }
    last = steps[-1]
    return found | {
        "steps": len(steps),
        "cpu_seconds_per_step": last.cpu_seconds / max(len(steps) - 1, 1),
        "seconds_per_step": last.seconds / max(len(steps) - 1, 1),
        "final_reward": sum(step.reward for step in steps[-_WINDOW:]) / _WINDOW,
        "peak_gibibytes": last.peak_gibibytes,
    }
