"""More workers, longer tails: where throughput stops to follow, and what asynchrony gains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.harness.timed_engine import Lengths
from benchmarks.simulate.cluster import Cluster, Model, Workload
from benchmarks.simulate.figures import Limit, figures
from benchmarks.simulate.system import Generation, Step, System

SHARE_OF_LINEAR: Final = 0.9
"""Throughput below this share of what as many workers would give is a bottleneck's."""
MOST_WORKERS: Final = 10_000
TAIL_SIGMAS: Final = (0.1, 0.5, 1.0, 1.25)
"""Standard deviations of the logarithm of the length; 1 is a long tail, one of 20 responses above
5 medians."""
PAPER_LEARNER_SHARES: Final = (0.3, 0.4, 0.5, 0.55, 0.6)
"""Shares of a synchronous step in which the learner computes."""
_BALANCED_WORKERS: Final = 8
_PAPER_LENGTHS: Final = Lengths(median=2000.0, sigma=1.0, most=12_288)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The first number of workers that are too many, and what they wait for."""

    workers: int
    limit: Limit


def fixed_learner(model: Model, workload: Workload, *, by_shards: bool) -> Callable[[int], System]:
    """Return the system by number of workers, with the model's learner."""
    return lambda workers: Cluster(
        model=model,
        workers=workers,
        learner_gpus=model.learner_gpus,
        workload=workload,
        by_shards=by_shards,
    ).system()


def grown_learner(model: Model, workload: Workload, *, fed_by: int) -> Callable[[int], System]:
    """Return the system by number of workers, with a learner and a batch in proportion to them.

    fed_by: workers that keep the model's learner busy. Versions travel by shards.
    """

    def system(workers: int) -> System:
        gpus = max(1, round(model.learner_gpus * workers / fed_by))
        prompts = max(1, round(workload.prompts_per_step * workers / fed_by))
        return Cluster(
            model=model,
            workers=workers,
            learner_gpus=gpus,
            workload=replace(workload, prompts_per_step=prompts),
            by_shards=True,
        ).system()

    return system


def workers_of_balance(model: Model, workload: Workload) -> float:
    """Return how many workers generate what the model's learner trains on, by calculation."""
    one = Cluster(model=model, workers=1, learner_gpus=model.learner_gpus, workload=workload)
    return one.decoding_token_s() / one.learner_token_s() / workload.running


def bottleneck(system_of: Callable[[int], System], *, start: int) -> Bottleneck | None:
    """Return the first bottleneck above `start` workers; None if there is none to 10,000.

    The number is found to a tenth. Where all places generate, the limit is that of a run with twice
    as many workers, in which it shows.
    """
    per_worker = figures(system_of(start)).tokens_per_s / start

    def follows(workers: int) -> bool:
        found = figures(system_of(workers)).tokens_per_s
        return found >= SHARE_OF_LINEAR * per_worker * workers

    enough = start
    while follows(too_many := min(2 * enough, MOST_WORKERS)):
        if too_many == MOST_WORKERS:
            return None
        enough = too_many
    while too_many - enough > max(1, too_many // 10):
        middle = (enough + too_many) // 2
        enough, too_many = (middle, too_many) if follows(middle) else (enough, middle)
    limit = figures(system_of(too_many)).limit
    if limit is Limit.WORKERS:
        limit = figures(system_of(2 * too_many)).limit
    return Bottleneck(workers=too_many, limit=limit)


def with_faster_learner(system: System) -> System:
    """Return the system with twice the GPUs for a step."""
    return replace(system, step=replace(system.step, token_s=system.step.token_s / 2))


def with_larger_batch(system: System) -> System:
    """Return the system with twice the prompts in a step."""
    return replace(system, prompts_per_step=2 * system.prompts_per_step)


def with_higher_lag_limit(system: System) -> System:
    """Return the system with twice the lag limit."""
    return replace(system, max_policy_lag_steps=2 * system.max_policy_lag_steps)


def with_faster_receivers(system: System) -> System:
    """Return the system with workers that need a quarter of the time to take a version in."""
    versions = system.versions
    return replace(system, versions=replace(versions, applied_s=versions.applied_s / 4))


def with_kept_keys(system: System) -> System:
    """Return the system with workers that read nothing again (`kvCache: keep`)."""
    return replace(system, versions=replace(system.versions, pause_s=0.0))


LEVERS: Final = {
    "learner_twice_as_fast": with_faster_learner,
    "batch_twice_as_large": with_larger_batch,
    "lag_limit_twice_as_high": with_higher_lag_limit,
    "receivers_four_times_as_fast": with_faster_receivers,
    "keys_kept": with_kept_keys,
}
"""What may move a bottleneck, by its name."""


def balanced_system(*, sigma: float, max_policy_lag_steps: int) -> System:
    """Return a system without overheads in which neither side waits if lag has no limit.

    All places together hold one batch of 32 groups of 8; lengths have the same mean for every sigma
    but for the cut at eight means. A step takes as long as the mean group.
    """
    mean, group, groups = 1000.0, 8, 32
    lengths = Lengths(median=mean * math.exp(-(sigma**2) / 2), sigma=sigma, most=8000)
    return System(
        workers=_BALANCED_WORKERS,
        generation=Generation(
            lengths=lengths, token_s=0.01, places=groups * group // _BALANCED_WORKERS
        ),
        prompts_per_step=groups,
        group_size=group,
        max_policy_lag_steps=max_policy_lag_steps,
        step=Step(constant_s=lengths.expected_longest(group) * 0.01),
    )


def async_over_sync(sigma: float, max_policy_lag_steps: int) -> float:
    """Return steps per second with a lag limit over those without lag, in a balanced system."""
    synchronous_s, asynchronous_s = (
        figures(balanced_system(sigma=sigma, max_policy_lag_steps=lag)).step_s
        for lag in (0, max_policy_lag_steps)
    )
    return synchronous_s / asynchronous_s


def paper_gain(learner_share: float) -> float:
    """Return steps per second at k = 2 over those at k = 0, in a run like the paper's longest one.

    128 prompts of 16 responses of at most 12,288 tokens; two servers of 512 places (VCPO, arXiv
    2602.17616, its recipe for AIME). What it does not say is the learner's share of the time.

    learner_share: of a synchronous step, in (0, 1).
    """

    def system(max_policy_lag_steps: int, step_s: float) -> System:
        return System(
            workers=2,
            generation=Generation(lengths=_PAPER_LENGTHS, token_s=0.03, places=512),
            prompts_per_step=128,
            group_size=16,
            max_policy_lag_steps=max_policy_lag_steps,
            step=Step(constant_s=step_s),
        )

    generated_s = figures(system(0, 0.0)).step_s
    step_s = generated_s * learner_share / (1.0 - learner_share)
    return figures(system(0, step_s)).step_s / figures(system(2, step_s)).step_s
