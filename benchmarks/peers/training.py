"""What both sides train, and what a training took to a reward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model, its task, and the numbers that both sides share."""

    model: Path
    task: str
    parameters: Mapping[str, Any]
    prompts: int
    """Of one batch."""
    responses: int
    """To each prompt."""
    new_tokens: int
    rate: float
    rewards: tuple[float, float]
    """What a training has to reach; ratios are of the second."""
    steps: int
    """After which both have been reached, as a rule."""
    is_bfloat16: bool = False
    """Whether both sides compute in bfloat16 and keep their parameters in float32."""
    lag: int = 6
    """Largest age of a response, in versions, where workers generate ahead."""
    workers: int = 2
    """Which generate ahead."""


TRAININGS: Final = {
    "tiny": Training(
        model=ROOT / "examples" / "models" / "tiny",
        task="sort_digits",
        parameters={"digits": 5, "style": "plain"},
        prompts=16,
        responses=8,
        new_tokens=16,
        steps=90,
        rate=1e-4,
        rewards=(0.9, 0.95),
    ),
    "smollm2": Training(  # as examples/sums_smollm2.yaml, of smaller numbers at twice its rate
        model=ROOT / "examples" / "models" / "smollm2",
        task="examples.sums:Sums",
        parameters={"values": [1, 12]},
        prompts=6,
        responses=6,
        new_tokens=12,
        steps=30,
        lag=2,
        workers=1,
        rate=2e-5,
        rewards=(0.5, 0.8),
        is_bfloat16=True,
    ),
}
"""By the name of their model: 0.2 and 135 million parameters."""
STEP_MARK: Final = "STEP "
"""Begins each line of TRL's side that has a step."""
WINDOW: Final = 5
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
    for number in range(WINDOW, len(steps) + 1):
        window = steps[number - WINDOW : number]
        if sum(step.reward for step in window) / WINDOW >= reward:
            return number
    return None


def summary(steps: Sequence[Step], rewards: Sequence[float]) -> dict[str, Any]:
    """Return what a training took to each reward, and where it ended."""
    found: dict[str, Any] = {}
    for reward in rewards:
        number = steps_to(steps, reward)
        at = None if number is None else steps[number - 1]
        seconds = {name: at and round(getattr(at, name), 1) for name in ("seconds", "cpu_seconds")}
        found[f"to_{reward:g}"] = {"steps": number, **seconds}
    last = steps[-1]
    return found | {
        "steps": len(steps),
        "cpu_seconds_per_step": last.cpu_seconds / max(len(steps) - 1, 1),
        "seconds_per_step": last.seconds / max(len(steps) - 1, 1),
        "final_reward": sum(step.reward for step in steps[-WINDOW:]) / WINDOW,
        "peak_gibibytes": last.peak_gibibytes,
    }
