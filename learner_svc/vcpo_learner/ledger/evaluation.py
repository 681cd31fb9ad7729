"""Evaluation rounds: workers generate responses to held-out prompts beside their training work.

A round leases every held-out prompt. It ends when each prompt is complete or has failed too often.
The ledger does not know of a round: its trajectories are never trained on, and the accounting does
not count them.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from vcpo.algo.health.collapse import near_rewards
from vcpo.api import VCPORunSpec
from vcpo.records.journal import EvaluationRecord
from vcpo.wire.trajectory import Trajectory
from vcpo.wire.versions import step_of
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.lease import MAX_ATTEMPTS, Lease, Purpose, SubmitOutcome
from vcpo_learner.ledger.lease_book import LeaseBook

_PROMPTS_SHOWN: Final = 8
"""Prompts with a response in the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The result of a round."""

    record: EvaluationRecord
    """Without rewards that are far from the others, and without prompts that repeat another."""
    first_responses: Mapping[int, Trajectory]
    """One to each of the first prompts that has any, by prompt's index, in their order."""


class EvaluationRound:
    """One pass over the held-out prompts, or the idle time between two. Owner: the dispatcher.

    Between two passes nothing is leased, held or expired.
    """

    def __init__(
        self,
        spec: VCPORunSpec,
        *,
        step: int | None,
        incarnation: str,
        clock: Clock,
        is_exclusive: bool = False,
    ) -> None:
        """Begin a round at a version.

        step: optimizer steps taken; None: no round, only idle time.
        is_exclusive: whether only the round's prompts are granted, to holders of the newest version
            only.
        """
        self.is_running = step is not None
        self.is_exclusive = is_exclusive
        self._step = step or 0
        self.leases = LeaseBook(
            prefix=f"evaluation-{incarnation}-{step}",
            timeout_s=spec.lease.timeout_seconds,
            clock=clock,
        )
        """The open leases; changed here only."""
        numbers = tuple(range(spec.evaluation.samples_per_prompt))
        self._waiting = deque(
            Lease(
                purpose=Purpose.EVALUATION,
                prompt_index=index,
                group_number=index,
                response_numbers=numbers,
            )
            for index in range(spec.evaluation.prompts if self.is_running else 0)
        )
        self._responses: dict[int, list[Trajectory]] = {}
        """By prompt, in the order in which they came."""

    @property
    def done(self) -> bool:
        return not self._waiting and not self.leases

    @property
    def num_missing(self) -> int:
        waiting = sum(len(prompt.response_numbers) for prompt in self._waiting)
        return waiting + self.leases.num_missing

    def grant(self, worker_id: str, *, max_trajectories: int, policy_version: int) -> list[Lease]:
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
                self.leases.open(
                    prompt,
                    worker_id=worker_id,
                    response_numbers=numbers,
                    policy_version=policy_version,
                )
            )
        return leases

    def submit(self, lease_id: str, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        lease = self.leases.get(lease_id)
        if lease is None:
            return [self.leases.outcome_when_closed(lease_id)] * len(trajectories)
        outcomes = self.leases.accept(lease, trajectories)
        if not lease.num_missing:
            self._responses.setdefault(lease.prompt_index, []).extend(lease.accepted.values())
        return outcomes

    def fail(self, lease_id: str, *, is_too_long: bool = False) -> None:
        """End a lease whose generation failed; requeue its prompt until `MAX_ATTEMPTS`.

        is_too_long: whether its prompt never fits; then it is given up at once.
        """
        lease = self.leases.close(lease_id)
        if lease is not None and lease.failures + 1 < MAX_ATTEMPTS and not is_too_long:
            self._requeue(lease, failed=True)

    def expire(self) -> list[str]:
        """End the leases whose time is over and requeue their prompts; return their workers."""
        expired = self.leases.expired_leases()
        self._release(expired)
        return [lease.worker_id for lease in expired]

    def release(self, worker_id: str, lease_ids: Sequence[str]) -> int:
        return self._release(self.leases.held_by(worker_id, lease_ids))

    def result(self) -> EvaluationResult | None:
        """Return the result; None if no response arrived."""
        if not self._responses:
            return None
        distinct: dict[tuple[int, ...], list[Trajectory]] = {}
        for _, own in sorted(self._responses.items()):
            distinct.setdefault(tuple(own[0].prompt_token_ids), own)
        responses = [each for own in distinct.values() for each in own]
        versions = [span.policy_version for one in responses for span in one.version_spans]
        record = EvaluationRecord(
            step=self._step,
            time_unix_s=time.time(),
            # One reward that is far from the others would make a checkpoint the best for ever.
            accuracy=fmean(near_rewards([response.reward for response in responses])),
            num_prompts=len(distinct),
            num_trajectories=len(responses),
            policy_version_min=step_of(min(versions)),
            policy_version_max=step_of(max(versions)),
        )
        shown = {at: own[0] for at, own in sorted(self._responses.items()) if at < _PROMPTS_SHOWN}
        return EvaluationResult(record=record, first_responses=shown)

    def _release(self, leases: Sequence[Lease]) -> int:
        for lease in leases:
            self.leases.close(lease.lease_id)
            self._requeue(lease, failed=False)
        return len(leases)

    def _requeue(self, lease: Lease, *, failed: bool) -> None:
        prompt = lease.requeue(partial_responses=(), failed=failed, is_lost=True)
        self._waiting.append(replace(prompt, response_numbers=lease.response_numbers))
