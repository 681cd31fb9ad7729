"""Evaluation rounds: held-out prompts that the rollout workers answer beside their training work.

A round leases every held-out prompt once and ends when each was answered or given up. It is kept
apart from the ledger: its trajectories are never trained on and not part of the accounting.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vcpo.wire.trajectory import Trajectory
from vcpo_learner.ledger.leases import Clock, LeaseBook, OpenLease, SubmitOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """What a round found."""

    step: int
    """Steps taken when the round began."""
    accuracy: float
    """Mean reward over the answers."""
    num_trajectories: int
    policy_version_min: int
    policy_version_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owed:
    """Answers to one prompt that nobody has been asked for."""

    prompt_index: int
    num_samples: int
    failures: int = 0
    """Times that generating them failed."""


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
        self.step = step
        self._max_attempts = max_attempts
        prefix = f"evaluation-{incarnation}-{step}"
        self._book = LeaseBook(prefix=prefix, timeout_s=lease_timeout_s, clock=clock)
        self._waiting = deque(
            _Owed(prompt_index=index, num_samples=samples_per_prompt)
            for index in range(num_prompts)
        )
        self._answers: list[Trajectory] = []

    @property
    def done(self) -> bool:
        """Whether every prompt was answered or given up."""
        return not self._waiting and not self._book

    def grant(
        self, worker_id: str, *, max_trajectories: int, policy_version: int
    ) -> list[OpenLease]:
        """Lease waiting prompts for up to `max_trajectories` answers.

        A prompt whose answers do not all fit is shared between leases: unlike a training group its
        answers are worth something one by one, and so no worker is too small for a round.
        """
        leases = []
        while self._waiting and max_trajectories > 0:
            owed = self._waiting.popleft()
            asked = min(owed.num_samples, max_trajectories)
            if asked < owed.num_samples:
                self._waiting.appendleft(replace(owed, num_samples=owed.num_samples - asked))
            max_trajectories -= asked
            leases.append(
                self._book.open(
                    worker_id=worker_id,
                    prompt_index=owed.prompt_index,
                    num_trajectories=asked,
                    attempt=owed.failures + 1,
                    policy_version=policy_version,
                )
            )
        return leases

    @property
    def num_unanswered(self) -> int:
        """Answers promised and not yet there, and those that nobody has been asked for."""
        waiting = sum(owed.num_samples for owed in self._waiting)
        return waiting + self.in_flight_by_worker().total()

    def in_flight_by_worker(self) -> Counter[str]:
        """Answers promised and not yet there, by worker."""
        return self._book.in_flight_by_worker()

    def held_by(self, worker_id: str) -> list[str]:
        """Open leases of a worker, oldest first."""
        return [lease.lease_id for lease in self._book.held_by(worker_id)]

    def has_issued(self, lease_id: str) -> bool:
        """Whether the lease is one of this round, open or closed."""
        return self._book.has_issued(lease_id)

    def submit(self, lease_id: str, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Accept answers; repeating a submission changes nothing.

        Raises:
            InvalidMessageError: when an id does not belong to the lease.
        """
        outcomes, fulfilled = self._book.submit(lease_id, trajectories)
        if fulfilled is not None:
            self._answers.extend(fulfilled.arrived.values())
        return outcomes

    def fail(self, lease_id: str) -> None:
        """End a lease whose generation failed; its answers are given up after `max_attempts`."""
        lease = self._book.close(lease_id)
        if lease is not None and lease.attempt < self._max_attempts:
            self._owe(lease, failures=lease.attempt)

    def expire(self) -> list[str]:
        """Let others answer the prompts of leases past their time; returns the worker of each."""
        expired = self._book.expired_leases()
        self._hand_back(expired)
        return [lease.worker_id for lease in expired]

    def release(self, worker_id: str, lease_ids: Sequence[str]) -> int:
        """Let others answer prompts handed back; no ids means all of the worker's."""
        return self._hand_back(self._book.held_by(worker_id, lease_ids))

    def result(self) -> EvaluationResult | None:
        """What was found; None when every prompt was given up."""
        if not self._answers:
            return None
        versions = [span.policy_version for one in self._answers for span in one.version_spans]
        return EvaluationResult(
            step=self.step,
            accuracy=sum(answer.reward for answer in self._answers) / len(self._answers),
            num_trajectories=len(self._answers),
            policy_version_min=min(versions),
            policy_version_max=max(versions),
        )

    def _hand_back(self, leases: Sequence[OpenLease]) -> int:
        for lease in leases:
            self._book.close(lease.lease_id)
            self._owe(lease, failures=lease.attempt - 1)
        return len(leases)

    def _owe(self, lease: OpenLease, *, failures: int) -> None:
        owed = _Owed(
            prompt_index=lease.prompt_index,
            num_samples=lease.num_trajectories,
            failures=failures,
        )
        self._waiting.append(owed)
