"""Measure what sampling more than needed gains and costs, where lengths have a long tail.

The ledger, the leases, gRPC, the receiver and the worker are real. Training takes no time, so that
every second is a second of generation. The engine is a fake, because the lengths of a random tiny
model have no known tail. A decoding step takes `--step-ms` and `--sequence-us` for each sequence,
in real time, as on hardware that is bound by reading the weights. Lengths are log-normal, truncated
at `--most`. A resumed response draws its length from the part of the distribution above its current
length, so interruptions do not change the lengths.

    python -m benchmarks.rollout.over_provision
    python -m benchmarks.rollout.over_provision --tokens 16 --sigma 0.1     short responses, no tail

The last line printed is JSON, for each way `ratio_<r>`:

    generation_seconds_ratio   wait of a step for its batch, to that of the plain run beside it
    tokens_wasted_fraction     share of sampled tokens that are never trained on
    tokens_resumed_fraction    tokens that other leases resumed, each time, per sampled token
    mean_token_lag             of trained tokens, in policy versions
    mean_tokens_ratio          length of trained responses, to the plain run's
    dropped                    trajectories by reason, per trajectory trained on
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.numpy

from benchmarks.harness.changes import store_in_process
from benchmarks.harness.timed_engine import Lengths, TimedEngine
from vcpo.api import VCPORun, VCPORunSpec
from vcpo.metrics import RolloutMetrics
from vcpo.wire.client import open_channel
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2_grpc, work_pb2_grpc
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.trajectory_ledger import TrajectoryLedger
from vcpo_learner.ledger.worker_registry import WorkerRegistry
from vcpo_learner.services.callers import Callers
from vcpo_learner.services.work import PolicyService, WorkService
from vcpo_rollout.environments.environment import Prompt, Split
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.worker import Worker, WorkerParts
from vcpo_rollout.transport.learner_client import LearnerClient
from vcpo_rollout.transport.weight_files import WeightFiles
from vcpo_rollout.weights.fetcher import WeightFetcher
from vcpo_rollout.weights.receiver import WeightReceiver

_INCARNATION = "now"
_WEIGHTS = safetensors.numpy.save({"weight": np.zeros(1, dtype=np.float32)})
_RESUMED = "vcpo_rollout_tokens_resumed_total"


class _Anything:
    """An environment and a codec that give every response the same reward."""

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(text="", answer="")

    def reward(self, prompt: Prompt, response: str) -> float:
        return 1.0

    def encode(self, text: str) -> tuple[int, ...]:
        return (1,)

    def decode(self, token_ids: Any, end_token_ids: frozenset[int]) -> str:
        return ""


@dataclass(slots=True, kw_only=True)
class Tally:
    """The numbers of a run."""

    waited_s: float = 0.0
    num_trained: int = 0
    tokens_trained: int = 0
    lag_tokens: int = 0
    """Sum over the tokens trained on of their lags."""
    tokens_sampled: int = 0
    tokens_left: int = 0
    """Still to be trained on, at the end."""
    tokens_resumed: float = 0.0
    dropped: dict[str, int] = field(default_factory=dict)

    def train(self, groups: list[Lease], policy_version: int) -> None:
        """Count a batch."""
        for trajectory in (one for group in groups for one in group.trajectories):
            self.num_trained += 1
            self.tokens_trained += trajectory.num_sampled_tokens
            self.lag_tokens += sum(lag * size for lag, size in trajectory.lags(policy_version))

    def report(self, plain: Tally) -> dict[str, Any]:
        """Return the numbers of the last line."""
        wasted = self.tokens_sampled - self.tokens_trained - self.tokens_left
        of_plain = plain.tokens_trained / plain.num_trained
        return {
            "generation_seconds_ratio": round(self.waited_s / plain.waited_s, 3),
            "tokens_wasted_fraction": round(wasted / self.tokens_sampled, 3),
            "tokens_resumed_fraction": round(self.tokens_resumed / self.tokens_sampled, 3),
            "mean_token_lag": round(self.lag_tokens / self.tokens_trained, 3),
            "mean_tokens_ratio": round(self.tokens_trained / self.num_trained / of_plain, 3),
            "dropped": {
                str(reason): round(number / self.num_trained, 3)
                for reason, number in sorted(self.dropped.items())
            },
        }


class InstantLearner:
    """A learner that does not train, and publishes a version after every batch."""

    def __init__(self, spec: VCPORunSpec) -> None:
        self.spec = spec
        self.ledger = TrajectoryLedger(
            prompts_per_step=spec.batch.prompts_per_step,
            trajectories_per_prompt=spec.batch.trajectories_per_prompt,
            lease_timeout_s=spec.lease.timeout_seconds,
            max_attempts=spec.lease.max_attempts,
            incarnation=_INCARNATION,
            clock=time.monotonic,
        )
        self.registry = WorkerRegistry(time.monotonic)
        self.dispatcher = Dispatcher(
            spec=spec,
            ledger=self.ledger,
            registry=self.registry,
            incarnation=_INCARNATION,
            clock=time.monotonic,
        )
        self.store = store_in_process(_INCARNATION, time.monotonic)

    def publish(self, version: int) -> None:
        """Publish a version."""
        self.store.publish(self.store.prepare(version, bytearray(_WEIGHTS)))
        self.dispatcher.resume_at(version)
        self.dispatcher.notify()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[LearnerClient]:
        """Yield a worker's client of the services."""
        server = WireServer(keys=None)
        work_pb2_grpc.add_WorkServiceServicer_to_server(
            WorkService(self.dispatcher, self.spec), server.grpc_server
        )
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(
            PolicyService(self.store, self.registry, Callers(self.dispatcher)), server.grpc_server
        )
        port = await server.start("127.0.0.1:0", ())
        channel = open_channel(f"127.0.0.1:{port}", key=None)
        try:
            yield LearnerClient(channel, worker_id="worker", rollout_group="main")
        finally:
            await channel.close()
            await server.stop(0)

    async def train(self, steps: int, warm_up: int, engine: TimedEngine) -> Tally:
        """Take batches; of the first steps only tokens count."""
        tally = Tally()
        for version in range(warm_up + steps):
            begun_s = time.perf_counter()
            groups = await self.dispatcher.next_batch()
            assert groups is not None
            tally.train(groups, version)
            if version >= warm_up:
                tally.waited_s += time.perf_counter() - begun_s
            self.publish(version + 1)
        tally.dropped = dict(self.ledger.counts().dropped)
        tally.tokens_sampled = engine.num_sampled
        return tally

    def tokens_left(self) -> int:
        """Return tokens that are buffered or requeued; only when nothing is in flight."""
        contents = self.ledger
        requeued = sum(prompt.num_partial_tokens for prompt in contents.requeued)
        return requeued + sum(group.num_sampled_tokens for group in contents.buffer.groups())


def make_worker(
    learner: LearnerClient, engine: TimedEngine, spec: VCPORunSpec, metrics: RolloutMetrics
) -> Worker:
    """Return a worker of that learner."""
    gauges = RolloutGauges(metrics)
    anything: Any = _Anything()
    return Worker(
        WorkerParts(
            learner=learner,
            receiver=WeightReceiver(
                learner=learner,
                engine=engine,
                gauges=gauges,
                fetcher=WeightFetcher(WeightFiles("127.0.0.1:0", gauges)),
            ),
            engine=engine,
            environment=anything,
            codec=anything,
            gauges=gauges,
            max_concurrent_sequences=spec.rollouts[0].max_concurrent_sequences,
            sequences_per_prompt=spec.batch.trajectories_per_prompt,
            follows_preemption=spec.batch.over_provision_ratio > 1.0,
            drain_s=0.0,
        )
    )


async def measure(arguments: argparse.Namespace, batch: dict[str, Any]) -> Tally:
    """Run one way and return its numbers."""
    spec = make_spec(arguments, batch)
    learner_services = InstantLearner(spec)
    lengths = Lengths(median=arguments.tokens, sigma=arguments.sigma, most=arguments.most)
    engine = TimedEngine(
        lengths,
        step_s=arguments.step_ms / 1e3,
        sequence_s=arguments.sequence_us / 1e6,
        seed=arguments.seed,
    )
    metrics = RolloutMetrics(run="run", group="main")
    async with learner_services.serve() as learner:
        worker = make_worker(learner, engine, spec, metrics)
        tasks = [asyncio.create_task(engine.run()), asyncio.create_task(worker.run())]
        learner_services.publish(0)
        tally = await learner_services.train(arguments.steps, arguments.warm_up, engine)
        labels = {"run": "run", "group": "main"}
        tally.tokens_resumed = metrics.registry.get_sample_value(_RESUMED, labels) or 0.0
        worker.shut_down()
        await tasks[1]
        tally.tokens_sampled = engine.num_sampled
        tally.tokens_left = learner_services.tokens_left()
        tasks[0].cancel()
    return tally


def make_spec(arguments: argparse.Namespace, batch: dict[str, Any]) -> VCPORunSpec:
    """Return a run that does not end by itself, with room for all leases."""
    sizes = {"promptsPerStep": arguments.prompts, "trajectoriesPerPrompt": arguments.group}
    spec = {
        "model": {"name": "none"},
        "environment": {"name": "countdown"},
        "steps": 1_000_000,
        "batch": {**sizes, **batch},
        "algorithm": {"maxPolicyLagSteps": arguments.lag},
        "sampling": {"maxNewTokens": arguments.most},
        "rollouts": [{"name": "main", "maxConcurrentSequences": arguments.places}],
    }
    return VCPORun.model_validate({"metadata": {"name": "over"}, "spec": spec}).spec


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways, one after the other."""
    ways: dict[str, dict[str, Any]] = {"plain": {}}
    ways |= {f"ratio_{ratio:g}": {"overProvisionRatio": ratio} for ratio in arguments.ratios}
    report: dict[str, Any] = {"lag_limit": arguments.lag}
    plain = None
    for name, batch in ways.items():
        tally = await measure(arguments, batch)
        plain = plain or tally
        report[name] = tally.report(plain)
        print(f"{name}: {tally.waited_s / arguments.steps:.3f} s a step {report[name]}", flush=True)
    return report


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step")
    parser.add_argument("--group", type=int, default=4, help="responses to each prompt")
    parser.add_argument("--tokens", type=float, default=48, help="median length of a response")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the length")
    parser.add_argument("--most", type=int, default=1024, help="longest response, tokens")
    parser.add_argument("--lag", type=int, default=1, help="lag limit, policy versions")
    parser.add_argument("--places", type=int, default=1024, help="sequences at a time")
    parser.add_argument("--step-ms", type=float, default=3.0, help="of a decoding step")
    parser.add_argument("--sequence-us", type=float, default=5.0, help="more for each sequence")
    parser.add_argument("--ratios", type=float, nargs="*", default=[1.5, 2.0])
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Measure and print JSON."""
    print(json.dumps(asyncio.run(compare(parse_arguments()))))


if __name__ == "__main__":
    main()
