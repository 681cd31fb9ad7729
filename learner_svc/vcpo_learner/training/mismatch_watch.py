"""Acts on the comparison of workers with the learner: events, workers set aside, end of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vcpo.algo.health.fresh_tokens import lower_median
from vcpo.algo.health.mismatch_review import MismatchError, MismatchReview
from vcpo.api import VCPORunSpec
from vcpo.records.reasons import SetAsideCause
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.telemetry.run_records import RunRecords
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.update.result import UpdateResult

_NAMED_WORKERS: Final = 8
"""Workers of a record, those with the largest gaps."""
_LARGEST_NATS: Final = 1e3
"""Largest gap that a record holds, because its numbers are finite."""


class MismatchWatch:
    """Ends the run or sets workers aside where they do not compute the learner's policy.

    A run whose engines disagree is told so. It ends where that is sure: at once if they never
    agreed since this start, else when it has lasted as long as failures may.

    Owner: the learner's event loop.
    """

    def __init__(
        self,
        spec: VCPORunSpec,
        *,
        dispatcher: Dispatcher,
        signals: SignalWindow,
        records: RunRecords,
        clock: Clock,
    ) -> None:
        self._num_at_start = spec.workers_at_start
        self._dispatcher = dispatcher
        self._signals = signals
        self._records = records
        self._clock = clock
        self._patience_s = spec.failure_policy.failure_tolerance_seconds
        self._engine_of_group = {each.name: each.engine_name for each in spec.rollouts}
        self._engines: dict[str, str] = {}
        """Engines of the workers that were seen last, by worker."""
        self._come: set[str] = set()
        """Workers that have shown fresh tokens, until there are as many as the run starts with."""
        self._first_shown_s: float | None = None
        """Time of the first fresh tokens."""
        self._is_wait_reported = False
        self._has_agreed = False
        """Whether workers and learner have agreed since this start."""
        self._disagree_since_s: float | None = None

    def after_step(self, result: UpdateResult) -> None:
        """Act on the fresh tokens of a step, before its version is published.

        Raises:
            MismatchError: if workers and learner surely do not compute the same policy.
        """
        review = result.mismatch
        if len(self._come) < self._num_at_start:
            self._come |= result.fresh.keys()
        for fault in review.at_fault:
            if fault.worker:  # a name that no worker has cannot be set aside
                self._dispatcher.set_aside(fault.worker, SetAsideCause.MISMATCH, fault.message)
        if review.gap_nats is None or review.limits is None:
            return
        if not review.is_exceeded:
            self._agree(review)
        elif review.is_majority(self._num_awaited()):
            self._disagree(review)
        elif not self._is_wait_reported:
            self._is_wait_reported = True
            self._records.event("SelfCheckWaits", self._wait(review))

    def record(self, review: MismatchReview) -> dict[str, Any]:
        """Return what a step record holds of the comparison; empty before there is one."""
        if review.gap_nats is None:
            return {}
        gaps = {name: each.gap.value for name, each in review.workers.items()}
        largest = sorted(gaps, key=lambda name: gaps[name], reverse=True)[:_NAMED_WORKERS]
        numbers = {
            "gap_nats": review.gap_nats,
            "gap_p99_nats": review.gap_p99_nats,
            "divergence_nats": review.divergence_nats,
            "scale_error": review.scale_error,
            "limit_nats": None if review.limits is None else review.limits.gap_nats,
            "worst_gap_nats": gaps[largest[0]],
            "is_exceeded": float(review.is_exceeded),
        }
        return {
            **{name: _finite(each) for name, each in numbers.items() if each is not None},
            "by_worker": {name: _finite(gaps[name]) for name in largest},
            "by_engine": self._by_engine(gaps),
            "by_position": {
                str(first): _finite(each) for first, each in review.gap_by_position.items()
            },
            "cause": review.cause,
        }

    def _agree(self, review: MismatchReview) -> None:
        if not self._has_agreed:
            assert review.limits is not None
            self._records.event(
                "SelfCheck",
                f"workers and learner differ by {review.gap_nats:.2g} nats per token; at most"
                f" {review.limits.gap_nats:.2g} is expected",
            )
        elif self._disagree_since_s is not None:
            gap = f"{review.gap_nats:.2g}"
            self._records.event("EnginesAgree", f"workers and learner differ by {gap} nats again")
        self._has_agreed, self._disagree_since_s = True, None
        self._signals.mismatch = ""

    def _disagree(self, review: MismatchReview) -> None:
        """Tell that most workers differ from the learner, or end the run.

        Raises:
            MismatchError: as `after_step`.
        """
        now_s = self._clock()
        message = (
            f"{review.message}. If the gap is intended, raise `learner.maxMismatchNats` above it"
        )
        if self._disagree_since_s is None:
            self._disagree_since_s = now_s
            self._records.event("EnginesDisagree", message)
        self._signals.mismatch = review.message
        has_lasted = now_s - self._disagree_since_s >= self._patience_s
        if review.is_sure and (has_lasted or not self._has_agreed):
            self._records.event("SelfCheckFailed", message)
            raise MismatchError(message)

    def _wait(self, review: MismatchReview) -> str:
        """Say who exceeds the limit, one worker or all together, and that others are waited for."""
        assert review.limits is not None
        limits = review.limits
        far = ((name, each) for name, each in review.workers.items() if each.exceeds(limits))
        name, gap_nats = next(
            ((name, each.gap.value) for name, each in far), ("the median worker", review.gap_nats)
        )
        return (
            f"{name} differs from the learner by {gap_nats:.3g} nats per token; at most"
            f" {limits.gap_nats:.3g} is expected. The run is judged when the others of its"
            f" {self._num_at_start} workers have shown fresh tokens too, or after"
            f" {self._patience_s:g} s (failurePolicy.failureToleranceSeconds)"
        )

    def _num_awaited(self) -> int:
        """Return how many of the workers with which the run starts have yet to show fresh tokens.

        After the time for which failures may last nobody is waited for.
        """
        if self._first_shown_s is None:
            self._first_shown_s = self._clock()
        lasted_s = self._clock() - self._first_shown_s
        if lasted_s >= self._patience_s:
            return 0
        return max(0, self._num_at_start - len(self._come))

    def _by_engine(self, gaps: Mapping[str, float]) -> dict[str, float]:
        """Return the gap of the median worker of each engine."""
        groups = {each.worker_id: each.rollout_group for each in self._dispatcher.workers()}
        found: dict[str, list[float]] = {}
        for name, gap in gaps.items():
            engine = self._engine_of_group.get(groups.get(name, "")) or self._engines.get(name)
            if engine is not None:
                self._engines[name] = engine
                found.setdefault(engine, []).append(gap)
        self._engines = {name: each for name, each in self._engines.items() if name in gaps}
        return {engine: _finite(lower_median(each)) for engine, each in sorted(found.items())}


def _finite(value: float) -> float:
    """Return a number as a record holds it."""
    return value if abs(value) <= _LARGEST_NATS else _LARGEST_NATS  # also of NaN
