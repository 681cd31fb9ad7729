"""What a simulated run shows after a warm-up: throughput, lag, egress, and what limits it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from statistics import fmean
from typing import Any, Final

from benchmarks.simulate.simulation import SimulatedStep, Simulation
from benchmarks.simulate.system import System

_LOGGER = logging.getLogger(__name__)
WARM_UP: Final = 5
STEPS: Final = 6
_LARGE_STEPS: Final = 3
_LARGE_BATCH: Final = 16_384
"""A batch of so many trajectories varies so little that fewer steps have the same mean to 1 %."""
_BUSY: Final = 0.9
"""A part that is busy for this share of the time is a limit."""


class Limit(StrEnum):
    """What a run waits for."""

    WORKERS = "workers"
    """All places generate."""
    LEARNER = "learner"
    """It computes without a pause."""
    PUBLICATION = "publication"
    """Steps wait for the version before them."""
    EVENT_LOOP = "event loop"
    """Its core is busy."""
    LAG = "lag limit"
    """Nothing is busy: no more may be in flight, or what took too long is generated again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Means over the steps after the warm-up."""

    tokens_per_s: float
    """Response tokens that are trained on."""
    step_s: float
    lag_mean: float
    dropped_share: float
    """Trajectories that were too old, over those that were trained on."""
    egress_bytes_per_s: float
    """Weights that the learner sends."""
    fan_out_s: float
    """Most seconds from an announcement to a worker's swap."""
    workers_busy: float
    """Share of the places' time in which a group holds them."""
    learner_busy: float
    """Share of the time in which the learner computes, its Python included."""
    learner_host: float
    """Share of the time of its Python alone, while the GPUs wait."""
    publication_wait: float
    """Share of the time in which its next step waits for a publication."""
    event_loop_busy: float

    @property
    def limit(self) -> Limit:
        """What the run waits for."""
        if self.learner_busy + self.publication_wait >= _BUSY:
            is_learner = self.learner_busy >= self.publication_wait
            return Limit.LEARNER if is_learner else Limit.PUBLICATION
        if self.event_loop_busy >= _BUSY:
            return Limit.EVENT_LOOP
        return Limit.WORKERS if self.workers_busy >= _BUSY else Limit.LAG

    def rounded(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        numbers = {name: float(f"{value:.4g}") for name, value in asdict(self).items()}
        return {**numbers, "limit": str(self.limit)}


@cache
def figures(system: System, *, seed: int = 0) -> Figures:
    """Simulate a run and return its figures; those of a system that was simulated before again."""
    num_steps = STEPS if system.batch_trajectories < _LARGE_BATCH else _LARGE_STEPS
    gc.disable()  # millions of small objects live at a time, and none of them is garbage in a cycle
    try:
        steps = Simulation(system, seed=seed).run(WARM_UP + num_steps)
    finally:
        gc.enable()
    found = figures_of(steps[WARM_UP - 1], steps[WARM_UP:], system)
    _LOGGER.info(
        "%d workers, %d prompts a step: %.3g tokens/s, limit: %s",
        system.workers,
        system.prompts_per_step,
        found.tokens_per_s,
        found.limit,
    )
    return found


def figures_of(start: SimulatedStep, steps: Sequence[SimulatedStep], system: System) -> Figures:
    """Return the figures of some steps; start: the step before them."""
    end = steps[-1]
    duration_s = end.ended_s - start.ended_s
    trained = len(steps) * system.batch_trajectories
    places = system.workers * system.generation.places
    return Figures(
        tokens_per_s=sum(step.tokens for step in steps) / duration_s,
        step_s=duration_s / len(steps),
        lag_mean=fmean(step.lag_mean for step in steps),
        dropped_share=(end.dropped - start.dropped) / trained,
        egress_bytes_per_s=(end.sent_bytes - start.sent_bytes) / duration_s,
        fan_out_s=end.fan_out_s,
        workers_busy=(end.place_s - start.place_s) / duration_s / places,
        learner_busy=(end.computed_s - start.computed_s) / duration_s,
        learner_host=(end.host_s - start.host_s) / duration_s,
        publication_wait=(end.published_s - start.published_s) / duration_s,
        event_loop_busy=(end.loop_s - start.loop_s) / duration_s,
    )
