"""Clocks, specs, answers and parts of a learner, as small as a test wants them."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vcpo.spec import VCPORun
from vcpo.wire.trajectory import FinishReason, PartialResponse, Trajectory, VersionSpan
from vcpo_learner.ledger.dispatcher import Assignment, Dispatcher, WorkRequest
from vcpo_learner.ledger.leases import OpenLease
from vcpo_learner.ledger.memory_ledger import TrajectoryLedger

INCARNATION = "now"
TIMEOUT_S = 10.0


class ManualClock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def make_run(**sections: Any) -> VCPORun:
    """A run of 3 steps with 2 prompts of 2 trajectories each, lag bound 1, one held-out prompt."""
    spec = {
        "model": {"name": "tiny"},
        "environment": {"name": "sort_digits"},
        "steps": 3,
        "batch": {"promptsPerStep": 2, "trajectoriesPerPrompt": 2},
        "algorithm": {"maxPolicyLagSteps": 1},
        "evaluation": {"prompts": 1, "everySteps": 100},
        "lease": {"timeoutSeconds": 10, "maxAttempts": 2},
    }
    document = {"metadata": {"name": "run"}, "spec": {**spec, **sections}}
    return VCPORun.model_validate(document)


def make_ledger(clock: ManualClock, *, incarnation: str = INCARNATION, **changes: Any):
    """A ledger with batches of 2 prompts, 2 trajectories each; 2 attempts."""
    settings = {
        "prompts_per_step": 2,
        "trajectories_per_prompt": 2,
        "lease_timeout_s": TIMEOUT_S,
        "max_attempts": 2,
        **changes,
    }
    return TrajectoryLedger(incarnation=incarnation, clock=clock, **settings)


def answer(
    lease_id: str,
    number: int,
    *,
    versions: Sequence[int] = (0,),
    reward: float = 1.0,
    logprob: float = -0.5,
) -> Trajectory:
    """One answer with one token for each version."""
    return Trajectory(
        trajectory_id=f"{lease_id}/{number}",
        prompt_token_ids=(3, 4),
        response_token_ids=tuple(range(5, 5 + len(versions))),
        rollout_logprobs=(logprob,) * len(versions),
        version_spans=tuple(VersionSpan(policy_version=one, num_tokens=1) for one in versions),
        reward=reward,
        finish_reason=FinishReason.STOP,
    )


def answers(lease: OpenLease, **details: Any) -> list[Trajectory]:
    """All answers of a lease."""
    return [answer(lease.lease_id, number, **details) for number in range(lease.num_trajectories)]


def begun_answer(*versions: int, finish_reason: FinishReason | None = None) -> PartialResponse:
    """An answer under way with one token for each version."""
    return PartialResponse(
        token_ids=tuple(range(5, 5 + len(versions))),
        logprobs=(-0.5,) * len(versions),
        version_spans=tuple(VersionSpan(policy_version=one, num_tokens=1) for one in versions),
        finish_reason=finish_reason,
    )


@dataclass
class Desk:
    """A dispatcher with the parts that a test turns by hand."""

    clock: ManualClock
    ledger: TrajectoryLedger
    dispatcher: Dispatcher

    def submit(self, assignment: Assignment, *, worker_id: str = "w", **details: Any) -> list[str]:
        lease = assignment.lease
        outcomes = self.dispatcher.submit(worker_id, lease.lease_id, answers(lease, **details))
        return [str(outcome) for outcome in outcomes]


def make_desk(**sections: Any) -> Desk:
    """A dispatcher over an empty ledger, for the run of `make_run(**sections)`."""
    spec = make_run(**sections).spec
    clock = ManualClock()
    ledger = make_ledger(
        clock,
        prompts_per_step=spec.batch.prompts_per_step,
        trajectories_per_prompt=spec.batch.trajectories_per_prompt,
        redundant_trajectories=spec.batch.redundant_trajectories,
    )
    dispatcher = Dispatcher(spec=spec, ledger=ledger, incarnation=INCARNATION, clock=clock)
    return Desk(clock=clock, ledger=ledger, dispatcher=dispatcher)


def asking(
    *,
    worker_id: str = "w",
    held: int = 0,
    room: int = 100,
    incarnation: str = INCARNATION,
    updates_in_flight: int = 0,
) -> WorkRequest:
    """A worker's request for work."""
    return WorkRequest(
        worker_id=worker_id,
        rollout_group="main",
        incarnation=incarnation,
        held_policy_version=held,
        max_trajectories=room,
        weight_updates_in_flight=updates_in_flight,
    )


def prompts(leases: Iterable[OpenLease]) -> list[int]:
    return [lease.prompt_index for lease in leases]


async def settle() -> None:
    """Let every coroutine that can go on do so; none of them waits for time to pass."""
    for _ in range(20):
        await asyncio.sleep(0)
