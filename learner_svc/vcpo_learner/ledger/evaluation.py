"""Evaluation rounds: workers generate responses to held-out prompts beside their training work.

A round leases every held-out prompt. It ends when each prompt is complete or has failed too often.
The ledger does not know of a round: its trajectories are never trained on, and the accounting does
not count them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from vcpo.algo import near_rewards
from vcpo.api import VCPORunSpec
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.leases import LeaseBook, OpenLease, SubmitOutcome

_PROMPTS_SHOWN: Final = 3
"""Prompts with a response in the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The result of a round."""

    step: int
    """Optimizer steps taken when the round began."""
    accuracy: float
    """Mean reward of the responses, without rewards that are far from the others."""
    num_trajectories: int
    policy_version_min: int
    policy_version_max: int
    first_responses: tuple[Trajectory, ...] = ()
    """One to each of the first prompts that has any, in order of the prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WaitingPrompt:
    """Responses to one prompt that are not leased to a worker."""

    prompt_index: int
    response_numbers: tuple[int, ...]
    failures: int = 0
    """Failed generations of these responses."""
    lost_leases: int = 0
    """As in `RequeuedPrompt`."""


class EvaluationRound:
    """One pass over the held-out prompts. Owner: the learner's event loop."""

    def __init__(
        self,
        *,
        step: int,
        num_prompts: int,
        samples_per_prompt: int,
        lease_timeout_s: float,
        max_attempts: int,
        incarnation: str,
        clock: Clock,
    ) -> None:
        self._step = step
        self._max_attempts = max_attempts
        prefix = f"evaluation-{incarnation}-{step}"
        self._book = LeaseBook(prefix=prefix, timeout_s=lease_timeout_s, clock=clock)
        self._waiting = deque(
            _WaitingPrompt(prompt_index=index, response_numbers=tuple(range(samples_per_prompt)))
            for index in range(num_prompts)
        )
        self._responses: list[Trajectory] = []
        self._first_responses: dict[int, Trajectory] = {}
        """By prompt, of those that are shown."""

    @property
    def done(self) -> bool:
        """Whether every prompt is complete or has failed too often."""
        return not self._waiting and not self._book

    def grant(
        self, worker_id: str, *, max_trajectories: int, policy_version: int
    ) -> list[OpenLease]:
        """Lease waiting prompts for up to `max_trajectories` responses.

        A prompt may be split between leases: unlike a training group, an incomplete one still
        counts. So a worker of any size can take part in a round.
        """
        leases = []
        while self._waiting and max_trajectories > 0:
            prompt = self._waiting.popleft()
            numbers = prompt.response_numbers[:max_trajectories]
            if rest := prompt.response_numbers[max_trajectories:]:
                self._waiting.appendleft(replace(prompt, response_numbers=rest))
            max_trajectories -= len(numbers)
            leases.append(
                self._book.open(
                    worker_id=worker_id,
                    prompt_index=prompt.prompt_index,
                    response_numbers=numbers,
                    group_number=prompt.prompt_index,
                    attempt=prompt.failures + 1,
                    lost_leases=prompt.lost_leases,
                    policy_version=policy_version,
                )
            )
        return leases

    @property
    def num_missing(self) -> int:
        """Responses that have not arrived, leased to a worker or not."""
        waiting = sum(len(prompt.response_numbers) for prompt in self._waiting)
        return waiting + self._book.num_missing

    def in_flight_by_worker(self) -> Mapping[str, int]:
        """Return the number of leased responses that have not arrived, by worker."""
        return self._book.in_flight_by_worker()

    def held_by(self, worker_id: str) -> list[str]:
        """Return the open leases of a worker, oldest first."""
        return [lease.lease_id for lease in self._book.held_by(worker_id)]

    def has_issued(self, lease_id: str) -> bool:
        """Return whether the lease belongs to this round, open or closed."""
        return self._book.has_issued(lease_id)

    def granted_s(self, lease_id: str) -> float:
        """Return when an open lease was granted; infinitely early if it is not open."""
        return self._book.granted_s(lease_id)

    def holder_of(self, lease_id: str) -> str | None:
        """Return the worker of an open lease of this round; None if it is none."""
        return self._book.holder_of(lease_id)

    def submit(self, lease_id: str, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Accept responses; a repeated submission changes nothing.

        Raises:
            InvalidMessageError: if a trajectory does not belong to the lease.
        """
        outcomes, fulfilled = self._book.submit(lease_id, trajectories)
        if fulfilled is not None:
            arrived = list(fulfilled.arrived.values())
            self._responses.extend(arrived)
            if fulfilled.prompt_index < _PROMPTS_SHOWN:
                self._first_responses.setdefault(fulfilled.prompt_index, arrived[0])
        return outcomes

    def fail(self, lease_id: str, *, is_too_long: bool = False) -> None:
        """End a lease whose generation failed; requeue its prompt until `max_attempts`.

        is_too_long: whether its prompt never fits; then it is given up at once.
        """
        lease = self._book.close(lease_id)
        if lease is not None and lease.attempt < self._max_attempts and not is_too_long:
            self._requeue(lease, failed=True)

    def expire(self) -> list[str]:
        """End the leases whose time is over and requeue their prompts; return their workers."""
        expired = self._book.expired_leases()
        self._release(expired)
        return [lease.worker_id for lease in expired]

    def release(self, worker_id: str, lease_ids: Sequence[str]) -> int:
        """End leases of a worker, all if `lease_ids` is empty; requeue their prompts."""
        return self._release(self._book.held_by(worker_id, lease_ids))

    def result(self) -> EvaluationResult | None:
        """Return the result; None if no response arrived."""
        if not self._responses:
            return None
        sorted_by_prompt = sorted(self._first_responses.items(), key=lambda item: item[0])
        versions = [span.policy_version for one in self._responses for span in one.version_spans]
        return EvaluationResult(
            step=self._step,
            # One reward that is far from the others would make a checkpoint the best for ever.
            accuracy=fmean(near_rewards([response.reward for response in self._responses])),
            num_trajectories=len(self._responses),
            policy_version_min=min(versions),
            policy_version_max=max(versions),
            first_responses=tuple(response for _, response in sorted_by_prompt),
        )

    def _release(self, leases: Sequence[OpenLease]) -> int:
        for lease in leases:
            self._book.close(lease.lease_id)
            self._requeue(lease, failed=False)
        return len(leases)

    def _requeue(self, lease: OpenLease, *, failed: bool) -> None:
        prompt = _WaitingPrompt(
            prompt_index=lease.prompt_index,
            response_numbers=lease.response_numbers,
            failures=lease.attempt - (not failed),
            lost_leases=lease.lost_leases_after(failed=failed),
        )
        self._waiting.append(prompt)


class EvaluationRounds:
    """The rounds of a run, one at a time. Owner: the dispatcher.

    Between two rounds nothing is leased, held or expired.
    """

    def __init__(self, spec: VCPORunSpec, *, incarnation: str, clock: Clock) -> None:
        self.current: EvaluationRound | None = None
        self.is_exclusive = False
        """Whether only the round's prompts are granted, to holders of the newest version only."""
        self._spec = spec
        self._incarnation = incarnation
        self._clock = clock

    def begin(self, step: int, *, exclusive: bool) -> EvaluationRound:
        """Begin a round at a version; there is none now."""
        self.current = EvaluationRound(
            step=step,
            num_prompts=self._spec.evaluation.prompts,
            samples_per_prompt=self._spec.evaluation.samples_per_prompt,
            lease_timeout_s=self._spec.lease.timeout_seconds,
            max_attempts=self._spec.lease.max_attempts,
            incarnation=self._incarnation,
            clock=self._clock,
        )
        self.is_exclusive = exclusive
        return self.current

    def end(self) -> None:
        """End the round."""
        self.current, self.is_exclusive = None, False

    def of_lease(self, lease_id: str) -> EvaluationRound | None:
        """Return the round that issued a lease, open or closed; None for any other lease."""
        is_ours = self.current is not None and self.current.has_issued(lease_id)
        return self.current if is_ours else None

    def held_by(self, worker_id: str) -> list[str]:
        """Return the open leases of a worker, oldest first."""
        return [] if self.current is None else self.current.held_by(worker_id)

    def release(self, worker_id: str, lease_ids: Sequence[str]) -> int:
        """End leases of a worker, all if `lease_ids` is empty; return how many."""
        return 0 if self.current is None else self.current.release(worker_id, lease_ids)

    def expire(self) -> list[str]:
        """End the leases whose time is over; return their workers."""
        return [] if self.current is None else self.current.expire()
