"""The run's workers: the last contact of each, what it delivers, and whose failures its own are.

A worker is known by its name. A process that was set aside gets no work again; the one after it
under the same name shows another process id and begins anew.

Only other workers tell whether a generation fails because of what all share, or of its machine.

```
worker at fault   it failed half of M groups (`failurePolicy.maxFailuresInARow`) in a row that it
                  was granted after another worker had delivered; before, they prove nothing
run at fault      M failures in a row, and every worker at work has a share in them. If the run has
                  worked before, they must last: a reward server may be down for a while
```
"""

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, replace

from vcpo.api import VCPORunSpec
from vcpo.api.workloads import OverlongPrompts
from vcpo.records.reasons import NO_UPDATES, SetAsideCause, WeightUpdates
from vcpo.wire.failures import Failure, FailureCause, FailureCount, FailureCounts
from vcpo_learner.clock import Clock
from vcpo_learner.troubles import TOLERANCE_S, Answer, Trouble, Troubles

_MAX_NAMED = 16
"""Number of workers that signals name; metrics count all."""
WORKER_LOST_AFTER_S = 60.0
"""A worker without contact for longer is lost: it is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredWorker:
    """What the learner knows of one worker."""

    worker_id: str
    process_id: str = ""
    """Random, of its process."""
    last_seen_s: float = 0.0
    """Time of its last call, on the registry's clock."""
    rollout_group: str = ""
    policy_version: int = 0
    """Version that the worker held when it last asked for work."""
    peak_memory_bytes: int = 0
    """Most memory of its process until then."""
    accepted_trajectories: int = 0
    """Trajectories accepted from it since it registered."""
    request_number: int = 0
    """Requests for work since it registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAsideWorker:
    """A worker that the learner took out of the run."""

    worker_id: str
    rollout_group: str
    cause: SetAsideCause
    message: str
    """The worker's fault, as a clause."""
    time_s: float
    """Time at which it was set aside, on the learner's clock."""

    @property
    def sentence(self) -> str:
        return f"{self.cause}: {self.message}"


class WorkerRegistry:
    """The workers that asked for work lately, and those set aside. Owner: the learner's event loop.

    clock: of `RegisteredWorker.last_seen_s`.
    """

    def __init__(self, clock: Clock) -> None:
        self.weight_updates = NO_UPDATES
        """Versions that workers took, over all workers, those that are gone included."""
        self.num_set_aside: Counter[SetAsideCause] = Counter()
        self.latest_set_aside: deque[SetAsideWorker] = deque(maxlen=_MAX_NAMED)
        """The last of them, the latest first."""
        self._clock = clock
        self._workers: OrderedDict[str, RegisteredWorker] = OrderedDict()
        """By name, least recent contact first."""
        self._updates: dict[str, WeightUpdates] = {}
        """Counts that each process reported last."""
        self._set_aside: dict[str, SetAsideWorker] = {}
        """By process id."""

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def workers(self) -> list[RegisteredWorker]:
        return [each for each in self._workers.values() if self._is_alive(each)]

    def record_request(
        self,
        worker_id: str,
        rollout_group: str,
        policy_version: int,
        *,
        process_id: str = "",
        peak_memory_bytes: int = 0,
        weight_updates: WeightUpdates = NO_UPDATES,
    ) -> int:
        """Record that a worker asks for work; return the number of its request.

        weight_updates: counts of its process since the start of it.
        """
        while self._workers and not self._is_alive(next(iter(self._workers.values()))):
            self._workers.popitem(last=False)
        known = self._workers.get(worker_id)
        if known is None or known.process_id != process_id:
            known = RegisteredWorker(worker_id=worker_id, process_id=process_id)
        self.weight_updates += weight_updates - self._updates.get(process_id, NO_UPDATES)
        self._updates[process_id] = weight_updates
        worker = replace(
            known,
            rollout_group=rollout_group,
            policy_version=policy_version,
            peak_memory_bytes=peak_memory_bytes,
            request_number=known.request_number + 1,
        )
        self._put(worker)
        return worker.request_number

    def record_contact(
        self, worker_id: str, *, num_accepted: int = 0, request_number: int | None = None
    ) -> bool:
        """Record that a worker is alive; return False, and record nothing, if it does not count.

        A worker does not count if it has not asked for work or was deregistered since.

        num_accepted: trajectories of the worker that the learner has just accepted.
        request_number: if given, the worker must not have sent a later request for work.
        """
        worker = self._workers.get(worker_id)
        if worker is None or request_number not in {None, worker.request_number}:
            return False
        accepted = worker.accepted_trajectories + num_accepted
        self._put(replace(worker, accepted_trajectories=accepted))
        return True

    def deregister(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    def set_aside(self, worker_id: str, cause: SetAsideCause, message: str) -> SetAsideWorker:
        """Deregister a worker, and let its process get no work again; it may be gone already.

        message: what it did, as a clause without a full stop.
        """
        worker = self._workers.pop(worker_id, RegisteredWorker(worker_id=worker_id))
        found = SetAsideWorker(
            worker_id=worker_id,
            rollout_group=worker.rollout_group,
            cause=cause,
            message=message,
            time_s=self._clock(),
        )
        self.num_set_aside[cause] += 1
        self.latest_set_aside.appendleft(found)
        self._set_aside[worker.process_id] = found
        return found

    def set_aside_process(self, process_id: str) -> SetAsideWorker | None:
        return self._set_aside.get(process_id)

    def _put(self, worker: RegisteredWorker) -> None:
        self._workers[worker.worker_id] = replace(worker, last_seen_s=self._clock())
        self._workers.move_to_end(worker.worker_id)

    def _is_alive(self, worker: RegisteredWorker) -> bool:
        return worker.last_seen_s >= self._clock() - WORKER_LOST_AFTER_S


_NAMED_CAUSES = 3


class TooManyFailuresError(RuntimeError):
    """Every generation fails; the message says why and what to do."""


@dataclass(slots=True)
class _Row:
    """A worker's failures since its last success."""

    number: int = 0
    outdone_s: float = math.inf
    """When another worker first delivered in this row."""


class FailureWatch:
    """Counts failed generations and finds who is at fault. Owner: the learner's event loop."""

    def __init__(
        self, spec: VCPORunSpec, registry: WorkerRegistry, clock: Clock, troubles: Troubles
    ) -> None:
        self._environment = spec.environment
        self._policy = spec.failure_policy
        self._num_at_start = spec.workers_at_start
        self._registry = registry
        self._clock = clock
        self._troubles = troubles
        self._counts = FailureCounts()
        self._rows: dict[str, _Row] = {}
        """Of the workers whose last generation failed."""
        self._has_succeeded = False
        self._has_delivered = False
        """Whether a worker has delivered to this process."""
        self._latest_too_long: Failure | None = None
        self._causes = FailureCounts()
        """Since the last accepted trajectory."""
        self._failing: set[str] = set()
        """Workers that failed, or let a lease expire, since then."""

    @property
    def in_a_row(self) -> int:
        row = self._troubles.in_a_row
        return row(Trouble.GENERATION) + row(Trouble.PROMPT)

    @property
    def counts(self) -> list[FailureCount]:
        return list(self._counts)

    def record_success(self, worker_id: str | None = None) -> None:
        """Record an accepted trajectory, or that the run had some before this process started."""
        self._has_succeeded = True
        self._troubles.end_row(Trouble.GENERATION, Trouble.PROMPT)
        self._causes = FailureCounts()
        self._failing.clear()
        if worker_id is None:
            return
        self._has_delivered = True
        self.forget(worker_id)
        for row in self._rows.values():
            row.outdone_s = min(row.outdone_s, self._clock())

    def record_failure(self, worker_id: str, failure: Failure, *, granted_s: float) -> str | None:
        """Record a failed generation.

        granted_s: when its lease was granted; infinitely early if that is not known.

        Returns what the worker did, as a clause, if it is at fault; else None.
        """
        now_s, troubles, line = self._clock(), self._troubles, self._sentence(failure)
        self._counts.add(failure, now_s=now_s)
        if failure.cause is FailureCause.TOO_LONG:
            self._latest_too_long = failure
            troubles.report(Trouble.PROMPT, line, like=failure.kind)
            return None
        troubles.report(Trouble.GENERATION, line, like=failure.kind)
        self._causes.add(failure, now_s=now_s)
        self._failing.add(worker_id)
        for name in [name for name in self._rows if name not in self._registry]:
            self.forget(name)
        if worker_id not in self._registry:
            return None
        row = self._rows.setdefault(worker_id, _Row())
        row.number += 1
        if granted_s < row.outdone_s:
            return None
        if troubles.report(Trouble.WORKER, who=worker_id) is not Answer.SET_ASIDE:
            return None
        against = troubles.in_a_row(Trouble.WORKER, worker_id)
        return (
            f"{row.number} of its generations in a row failed, {against} of them after other"
            f" workers had delivered; the last one: {line}"
        )

    def record_expired(self, worker_id: str) -> None:
        self._failing.add(worker_id)

    def forget(self, worker_id: str) -> None:
        self._rows.pop(worker_id, None)
        self._troubles.end_row(Trouble.WORKER, who=worker_id)

    def must_wait(self, worker_id: str) -> bool:
        """Return whether a failing worker gets no work until others have shown whether they fail.

        A machine that is broken fails faster than others work.
        """
        row = self._rows.get(worker_id)
        if row is None or row.outdone_s < math.inf:
            return False
        return 2 * row.number >= self._policy.max_failures_in_a_row and not self._all_fail()

    def check(self) -> None:
        """Check whether the run can continue.

        Raises:
            TooManyFailuresError: if there were too many failures in a row, for too long; or one
                prompt that does not fit, if the run shall have none.
        """
        self._check_prompts()
        troubles, is_new = self._troubles, not self._has_succeeded
        answer = troubles.answer(Trouble.GENERATION, at_once=is_new)
        if answer is not Answer.END or not self._all_fail():
            return
        names = sorted(self._failing)
        where = f"each of {len(names)} workers" if len(names) > 1 else f"'{names[0]}'"
        causes = sorted(self._causes, key=lambda one: one.count, reverse=True)[:_NAMED_CAUSES]
        named = "; ".join(f"{one.count} of them: {self._sentence(one.latest)}" for one in causes)
        raise TooManyFailuresError(
            f"{troubles.in_a_row(Trouble.GENERATION)} generations in a row failed, on {where};"
            f" {named}; fix it and start again, or raise spec.failurePolicy.maxFailuresInARow"
        )

    def _check_prompts(self) -> None:
        """Check that prompts come that fit; some data sets begin with many that do not."""
        latest, name = self._latest_too_long, self._environment.name
        if latest is None:
            return
        if self._environment.overlong_prompts is OverlongPrompts.FAIL:
            raise TooManyFailuresError(
                f"a prompt of environment '{name}' does not fit into the model's context:"
                f" {latest.message}. spec.environment.overlongPrompts is 'fail'; 'skip' and"
                " 'truncate' go on"
            )
        if self._troubles.answer(Trouble.PROMPT) is Answer.END:
            raise TooManyFailuresError(
                f"{self._troubles.in_a_row(Trouble.PROMPT)} prompts of environment '{name}' in"
                f" {self._troubles.lasting_s(Trouble.PROMPT):.0f} s do not fit into the model's"
                f" context, and none did; the last one: {latest.message}"
            )

    def _all_fail(self) -> bool:
        """Return whether no worker is left that may deliver; those of the start are waited for."""
        at_work = {worker.worker_id for worker in self._registry.workers()}
        lasting_s = self._troubles.lasting_s(Trouble.GENERATION)
        is_early = lasting_s < TOLERANCE_S
        if is_early and len(at_work) < self._num_at_start and not self._has_delivered:
            return False
        return at_work <= self._failing

    def _sentence(self, failure: Failure) -> str:
        if not failure.cause.is_of_environment:
            return failure.sentence
        return f"environment '{self._environment.name}': {failure.sentence}"
