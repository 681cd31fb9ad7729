"""Evaluation rounds: held-out prompts that the rollout workers answer beside their training work.

A round leases every held-out prompt once and ends when each was answered or given up. It is kept
apart from the ledger: its trajectories are never trained on and not part of the accounting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from vcpo.wire.trajectory import Trajectory
from vcpo_learner.leases import Clock, LeaseBook, OpenLease, SubmitOutcome


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
        self._samples_per_prompt = samples_per_prompt
        self._max_attempts = max_attempts
        prefix = f"evaluation-{incarnation}-{step}"
        self._book = LeaseBook(prefix=prefix, timeout_s=lease_timeout_s, clock=clock)
        self._waiting: deque[tuple[int, int]] = deque((index, 0) for index in range(num_prompts))
        self._answers: list[Trajectory] = []

    @property
    def done(self) -> bool:
        """Whether every prompt was answered or given up."""
        return not self._waiting and not self._book

    def grant(
        self, worker_id: str, *, max_trajectories: int, policy_version: int
    ) -> list[OpenLease]:
        """Lease as many waiting prompts as fit into `max_trajectories`."""
        leases = []
        for _ in range(min(max_trajectories // self._samples_per_prompt, len(self._waiting))):
            prompt_index, attempts = self._waiting.popleft()
            leases.append(
                self._book.open(
                    worker_id=worker_id,
                    prompt_index=prompt_index,
                    num_trajectories=self._samples_per_prompt,
                    attempt=attempts + 1,
                    policy_version=policy_version,
                )
            )
        return leases

    def holds(self, lease_id: str) -> bool:
        """Whether the lease is an open one of this round."""
        return self._book.get(lease_id) is not None

    def submit(self, lease_id: str, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Accept answers of an open lease.

        Raises:
            InvalidMessageError: when an id does not belong to the lease.
            KeyError: when the lease is not open; ask `holds` first.
        """
        lease = self._book.get(lease_id)
        if lease is None:
            raise KeyError(lease_id)
        outcomes = lease.accept(trajectories)
        if lease.num_missing == 0:
            self._book.fulfill(lease)
            self._answers.extend(lease.arrived.values())
        return outcomes

    def fail(self, lease_id: str) -> None:
        """End a lease whose generation failed; the prompt is given up after `max_attempts`."""
        lease = self._book.get(lease_id)
        if lease is not None:
            self._book.abandon(lease)
            if lease.attempt < self._max_attempts:
                self._waiting.append((lease.prompt_index, lease.attempt))

    def expire(self) -> None:
        """Let others answer the prompts of leases past their time."""
        for lease in self._book.expired():
            self._hand_back(lease)

    def release(self, worker_id: str, lease_ids: Sequence[str]) -> int:
        """Let others answer prompts handed back; no ids means all of the worker's."""
        leases = self._book.held_by(worker_id)
        if lease_ids:
            leases = [lease for lease in leases if lease.lease_id in set(lease_ids)]
        for lease in leases:
            self._hand_back(lease)
        return len(leases)

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

    def _hand_back(self, lease: OpenLease) -> None:
        self._book.abandon(lease)
        self._waiting.append((lease.prompt_index, lease.attempt - 1))
