"""The learning rate at which a cell's steps were really taken, which its rule may hold below."""

from __future__ import annotations

import math
from statistics import median

from research.cells.records import CellRecord
from vcpo.algo.ess.verdict import judge_step
from vcpo.api import VCPORunSpec


def taken_rate(spec: VCPORunSpec, record: CellRecord) -> float:
    """Return the median over a cell's steps of full lag of the rate that was taken, at least 0.

    A cell without such a step has that of all its steps, and one without a step has 0.
    A record without the rates has the ESS ratios from which the rule computes them, in five digits.
    Steps that were skipped for want of a gradient count there as taken.

    spec: the cell's run.
    """
    recorded = record.steps.learning_rate
    rates = _recomputed(spec, record) if recorded is None else recorded
    return median(rates[record.lag :] or rates or (0.0,))


def _recomputed(spec: VCPORunSpec, record: CellRecord) -> tuple[float, ...]:
    """Return the rate of every step, as the learner decides it in a cell without mismatch."""
    base, region = spec.optimizer.learning_rate, spec.algorithm.trust_region
    limits, rates = spec.algorithm.step_limits, list[float]()
    size = spec.batch.trajectories
    steps = zip(record.steps.ess_ratio, record.steps.on_policy_ess_ratio, strict=True)
    for step, (ratio, on_policy) in enumerate(steps):
        if ratio == 0.0:  # a weight without a value: the step is refused
            rates.append(0.0)
            region = None if region is None else region.step(0.0)
            continue
        allowed = base
        if region is not None:
            missed = math.log(on_policy / ratio)
            region = region.observe(missed, {min(step, record.lag): 1}, num_weights=size)
            allowed = region.largest_rate(base)
        rate = judge_step(ratio, on_policy, limits).scale * allowed
        rates.append(rate)
        region = None if region is None else region.step(rate, allowed)
    return tuple(rates)
