"""Failed generations: their counts by worker, whose fault they are, and when the run ends.

If the environment has never worked, its author made a mistake: the run ends after
`failurePolicy.maxFailuresInARow` failures. If it worked before, it may depend on a service that is
down for a while, such as a reward server: the failures must also last `failureToleranceSeconds`.
Failures of one worker end no run while another one may deliver (`vcpo.control.faulty_workers`),
which may still be loading its model.
A prompt that is too long is no worker's fault, and counts apart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from vcpo.api import VCPORunSpec
from vcpo.api.workloads import OverlongPrompts
from vcpo.control.faulty_workers import (
    WorkerOutcomes,
    is_at_fault,
    is_run_at_fault,
    max_groups,
)
from vcpo.control.quota import Trust
from vcpo.wire.failures import Failure, FailureCause, FailureCount, FailureCounts
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.worker_registry import WorkerRegistry, max_workers

_MAX_EVENT_LINES = 64
_NAMED_CAUSES = 3
_NEW = WorkerOutcomes()


class TooManyFailuresError(RuntimeError):
    """Every generation fails; the message says why and what to do."""


class FailureWatch:
    """Counts failed generations and judges them. Owner: the learner's event loop.

    holds_lease: whether a worker holds a lease now.
    """

    def __init__(
        self,
        spec: VCPORunSpec,
        registry: WorkerRegistry,
        clock: Clock,
        *,
        holds_lease: Callable[[str], bool],
    ) -> None:
        self.in_a_row = 0
        """Failures since the last accepted trajectory."""
        self._environment = spec.environment.name
        self._overlong_prompts = spec.environment.overlong_prompts
        self._policy = spec.failure_policy
        self._lease_timeout_s = spec.lease.timeout_seconds
        self._num_at_start = spec.workers_at_start
        self._max_workers = max_workers(spec)
        self._registry = registry
        self._clock = clock
        self._holds_lease = holds_lease
        self._counts = FailureCounts()
        self._outcomes: dict[str, WorkerOutcomes] = {}
        """Outcomes of the registered workers, by their names."""
        self._failing: set[str] = set()
        """Registered workers whose last generation failed."""
        self._has_succeeded = False
        self._has_delivered = False
        """Whether a worker has delivered to this process."""
        self._row_began_s = 0.0
        self._too_long_in_a_row = 0
        """Failures of the row that are nobody's fault but the prompt's."""
        self._latest_too_long: Failure | None = None
        self._row_causes = FailureCounts()
        """The distinct failures of the row."""
        self._row_workers: Counter[str] = Counter()
        """The failures of the row by worker, of a bounded number of workers."""
        self._event_lines: deque[str] = deque(maxlen=_MAX_EVENT_LINES)

    @property
    def counts(self) -> list[FailureCount]:
        """The distinct failures, the latest first."""
        return list(self._counts)

    def record_success(self, worker_id: str | None = None) -> None:
        """Record an accepted trajectory, or that the run had some before this process started."""
        self._has_succeeded = True
        self.in_a_row = self._too_long_in_a_row = 0
        self._row_causes = FailureCounts()
        self._row_workers.clear()
        self._has_delivered = self._has_delivered or worker_id is not None
        if worker_id is not None and worker_id in self._registry:
            own = self._outcomes[worker_id] = self._of(worker_id).after_success(self._clock())
            self._failing.discard(worker_id)
            for name in self._failing:
                self._outcomes[name] = self._outcomes[name].after_success_of(own)

    def record_failure(self, worker_id: str, failure: Failure, *, granted_s: float) -> None:
        """Record a failed generation.

        granted_s: when its lease was granted; infinitely early if that is not known.
        """
        now_s = self._clock()
        if self.in_a_row == 0:
            self._row_began_s = now_s
        self.in_a_row += 1
        if (line := self._counts.add(failure, now_s=now_s)) is not None:
            self._event_lines.append(self._with_environment(line, failure))
        if failure.cause is FailureCause.TOO_LONG:
            self._too_long_in_a_row, self._latest_too_long = self._too_long_in_a_row + 1, failure
            return
        self._row_causes.add(failure, now_s=now_s)
        if worker_id in self._row_workers or len(self._row_workers) < self._max_workers:
            self._row_workers[worker_id] += 1
        for name in [name for name in self._outcomes if name not in self._registry]:
            self.forget(name)
        if worker_id in self._registry:
            self._failing.add(worker_id)
            self._outcomes[worker_id] = self._of(worker_id).after_failure(
                now_s, granted_s=granted_s, others=self._others(worker_id)
            )

    def forget(self, worker_id: str) -> None:
        """Forget how the generations of a worker ended; another process may take its name."""
        self._outcomes.pop(worker_id, None)
        self._failing.discard(worker_id)

    def fault_of(self, worker_id: str, failure: Failure) -> str | None:
        """Return what a worker did, as a clause, if it fails where others deliver; else None.

        failure: its last one.
        """
        outcomes = self._of(worker_id)
        if not is_at_fault(outcomes, self._policy.max_failures_in_a_row):
            return None
        return (
            f"{outcomes.in_a_row} of its generations in a row failed, {outcomes.against_others} of"
            " them after other workers had delivered; the last one:"
            f" {self._with_environment(failure.sentence, failure)}"
        )

    def max_groups(self, worker_id: str) -> int | None:
        """Return how many groups a worker may hold, because of its failures; None: any number."""
        outcomes = self._of(worker_id)
        if not outcomes.in_a_row:  # as of nearly all: count the others for none
            return None
        pending = [self._of(name) for name in self._pending(outcomes.row_began_s)]
        if self._awaits_workers(outcomes.row_began_s):
            pending.append(_NEW)
        most = self._policy.max_failures_in_a_row
        return max_groups(outcomes, self._others(worker_id), pending, most)

    def take_event_lines(self) -> list[str]:
        """Return the lines for events since the last call."""
        lines = list(self._event_lines)
        self._event_lines.clear()
        return lines

    def check(self) -> None:
        """Check whether the run can continue.

        Raises:
            TooManyFailuresError: if there were too many failures in a row, for too long; or one
                prompt that does not fit, if the run shall have none.
        """
        latest = self._latest_too_long
        if latest is not None and self._overlong_prompts is OverlongPrompts.FAIL:
            raise TooManyFailuresError(
                f"a prompt of environment '{self._environment}' does not fit into the model's"
                f" context: {latest.message}. spec.environment.overlongPrompts is 'fail'; 'skip'"
                " and 'truncate' go on"
            )
        most = self._policy.max_failures_in_a_row
        if self.in_a_row < most:
            return
        self._check_prompts()
        num_failures = self.in_a_row - self._too_long_in_a_row
        if self._awaits_workers(self._row_began_s):
            return
        if not is_run_at_fault(self._row_workers, self._pending(self._row_began_s), most):
            return
        lasted_s = self._clock() - self._row_began_s
        if self._has_succeeded and lasted_s < self._policy.failure_tolerance_seconds:
            return
        raise TooManyFailuresError(
            f"{num_failures} generations in a row failed, on {self._failing_workers()};"
            f" {self._causes()}. Fix the cause and start the run again;"
            " spec.failurePolicy.maxFailuresInARow sets how many are allowed"
        )

    def _check_prompts(self) -> None:
        """Check that prompts still come that fit; some data sets begin with many that do not.

        Raises:
            TooManyFailuresError: if none fits, for too long.
        """
        number, latest = self._too_long_in_a_row, self._latest_too_long
        lasted_s = self._clock() - self._row_began_s
        if latest is None or number < self._policy.max_failures_in_a_row:
            return
        if lasted_s >= self._policy.failure_tolerance_seconds:
            raise TooManyFailuresError(
                f"{number} prompts of environment '{self._environment}' in {lasted_s:.0f} s do not"
                f" fit into the model's context, and none did; the last one: {latest.message}."
                " spec.failurePolicy.failureToleranceSeconds sets for how long the run goes on"
            )

    def _of(self, worker_id: str) -> WorkerOutcomes:
        return self._outcomes.get(worker_id, _NEW)

    def _others(self, worker_id: str) -> list[WorkerOutcomes]:
        return [each for name, each in self._outcomes.items() if name != worker_id]

    def _pending(self, since_s: float) -> list[str]:
        """Return the workers that may still deliver, whether or not they have failed.

        One that let a lease expire may not, and neither may one that has had the time of a lease,
        since `since_s`, and holds none.
        """
        is_early = self._clock() - since_s < self._lease_timeout_s
        return [
            worker.worker_id
            for worker in self._registry.workers()
            if worker.trust is not Trust.DOUBTED
            and (is_early or self._holds_lease(worker.worker_id))
        ]

    def _awaits_workers(self, since_s: float) -> bool:
        """Return whether workers with which the run starts have yet to come, and may deliver.

        They are waited for after `since_s` as long as failures may last.
        """
        is_early = self._clock() - since_s < self._policy.failure_tolerance_seconds
        is_one_missing = len(self._registry.workers()) < self._num_at_start
        return is_early and is_one_missing and not self._has_delivered

    def _failing_workers(self) -> str:
        """Return the workers of the row, in words."""
        names = list(self._row_workers)
        if len(names) > 1:
            return f"each of {len(names)} workers"
        return f"'{names[0]}', the only worker at work"

    def _causes(self) -> str:
        """Return the most frequent causes of the row, in words."""
        causes = sorted(self._row_causes, key=lambda one: one.count, reverse=True)
        return "; ".join(
            f"{one.count} of them: {self._with_environment(one.latest.sentence, one.latest)}"
            for one in causes[:_NAMED_CAUSES]
        )

    def _with_environment(self, line: str, failure: Failure) -> str:
        """Put the environment's name before a line if the environment caused the failure."""
        if not failure.cause.is_of_environment:
            return line
        return f"environment '{self._environment}': {line}"
