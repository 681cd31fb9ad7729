"""Measure what a finished step costs the learner's event loop to show as metrics.

Weights, rewards and lags of its trajectories are observed, as after every step. Beside it the same
observations are made one by one with `prometheus_client`.

    python -m benchmarks.learner.record_step

The last line printed is JSON:

    record_step_ms              least time of a step of `--prompts` x `--group` trajectories
    one_by_one_ms               the same three histograms with `prometheus_client.Histogram`
    ratio_vs_one_by_one

Exit status 1 when the step costs more than the observations alone do one by one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence

from prometheus_client import Histogram

from benchmarks.learner.ingest import make_dispatcher, make_responses
from vcpo.api import VCPORunSpec
from vcpo.metrics import LearnerMetrics
from vcpo.records.step_record import StepRecord
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.signals import SignalWindow

_TOKENS = 64


def make_groups(num_groups: int, group_size: int) -> list[Lease]:
    """Return the groups of a step."""
    responses = iter(make_responses(num_groups * group_size, _TOKENS))
    return [
        Lease(
            grant_number=number,
            group_number=number,
            lease_id=str(number),
            worker_id="w",
            prompt_index=number,
            accepted={member: next(responses) for member in range(group_size)},
        )
        for number in range(num_groups)
    ]


def make_gauges() -> LearnerGauges:
    """Return the gauges of a learner that has done nothing yet."""
    spec = VCPORunSpec.model_validate(
        {"model": {"name": "none"}, "environment": {"name": "sort_digits"}, "steps": 1}
    )
    dispatcher = make_dispatcher(spec)
    signals = SignalWindow(
        run_name="run",
        total_steps=1,
        batch_trajectories=spec.batch.trajectories,
        dispatcher=dispatcher,
        clock=time.monotonic,
    )
    return LearnerGauges(LearnerMetrics(run="run"), dispatcher=dispatcher, signals=signals)


def make_record() -> StepRecord:
    """Return the record of a step; its numbers have no effect on the time."""
    return StepRecord(
        reward_mean=0.5,
        response_tokens_mean=float(_TOKENS),
        ess_ratio=0.5,
        on_policy_ess_ratio=1.0,
        step=1,
        time_unix_s=0.0,
        lag_mean=0.0,
        lag_p50=0,
        lag_max=0,
        step_s=1.0,
        idle_s=0.0,
        tokens_per_s=0.0,
        lag_limit_steps=8,
        workers=1,
        leased=0,
        in_flight=0,
        buffered=0,
        consumed=0,
    )


def one_by_one(groups: Sequence[Lease], log_weights: Sequence[float]) -> Callable[[], None]:
    """Return a function that makes a step's observations with the library's histograms."""
    weight, reward, lag = (
        Histogram(metric.name, metric.help, buckets=metric.buckets, registry=None)
        for metric in (
            LearnerMetrics.log_importance_weight,
            LearnerMetrics.reward,
            LearnerMetrics.policy_lag_steps,
        )
    )
    trajectories = [one for group in groups for one in group.trajectories]

    def observe() -> None:
        for one, log_weight in zip(trajectories, log_weights, strict=True):
            weight.observe(log_weight)
            reward.observe(one.reward)
            lag.observe(-one.oldest_policy_version)

    return observe


def least_ms(work: Callable[[], None], repeats: int) -> float:
    """Return the least time of a call, in milliseconds."""
    times = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun_s)
    return 1e3 * min(times)


def main() -> int:
    """Measure, print JSON, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=128, help="groups of a step")
    parser.add_argument("--group", type=int, default=8, help="trajectories of a group")
    parser.add_argument("--repeats", type=int, default=100, help="steps of one measurement")
    arguments = parser.parse_args()
    groups = make_groups(arguments.prompts, arguments.group)
    rng = random.Random(0)  # noqa: S311 - no secret
    log_weights = [rng.gauss(0.0, 2.0) for _ in range(arguments.prompts * arguments.group)]
    gauges, record = make_gauges(), make_record()
    step_ms = least_ms(lambda: gauges.record_step(record, groups, log_weights), arguments.repeats)
    single_ms = least_ms(one_by_one(groups, log_weights), arguments.repeats)
    report = {
        "record_step_ms": round(step_ms, 2),
        "one_by_one_ms": round(single_ms, 2),
        "ratio_vs_one_by_one": round(step_ms / single_ms, 2),
    }
    sys.stdout.write(f"{json.dumps(report)}\n")
    return 0 if step_ms < single_ms else 1


if __name__ == "__main__":
    raise SystemExit(main())
