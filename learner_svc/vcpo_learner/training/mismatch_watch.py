"""Acts on the comparison of workers with the learner: events, workers set aside, end of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vcpo.algo.health.fresh_tokens import lower_median
from vcpo.algo.health.mismatch_review import MismatchError, MismatchReview
from vcpo.api import VCPORunSpec
from vcpo.records.reasons import SetAsideCause
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.troubles import Troubles
from vcpo_learner.update.result import UpdateResult

_NAMED_WORKERS: Final = 8
"""Workers of a record, those with the largest gaps."""
_LARGEST_NATS: Final = 1e3
"""Largest gap that a record holds, because its numbers are finite."""


@dataclass(slots=True, kw_only=True, eq=False)
class MismatchWatch:
    """Ends the run or sets workers aside where they do not compute the learner's policy.

    The first reading since this start is a self-check: above the limit it ends the run. A later
    one is told.

    Owner: the learner's event loop.
    """

    spec: VCPORunSpec
    dispatcher: Dispatcher
    signals: SignalWindow
    troubles: Troubles
    _agrees: bool | None = None
    """What the last reading said; None before the first."""
    _engines: dict[str, str] = field(default_factory=dict)
    """Engines of the workers that were seen last, by worker."""

    def after_step(self, result: UpdateResult) -> None:
        """Act on the fresh tokens of a step, before its version is published.

        Raises:
            MismatchError: if workers and learner do not compute the same policy from the start.
        """
        review, agreed = result.mismatch, self._agrees
        for fault in review.at_fault:
            if fault.worker:  # a name that no worker has cannot be set aside
                self.dispatcher.set_aside(fault.worker, SetAsideCause.MISMATCH, fault.message)
        if review.gap_nats is None:
            return
        self._agrees = not review.is_exceeded
        message = (
            f"{review.message}. If the gap is intended, raise `learner.maxMismatchNats` above it"
        )
        if review.is_exceeded and agreed is None:
            self.troubles.tell("SelfCheckFailed", message)
            raise MismatchError(message)
        if agreed is None:
            self.troubles.tell(
                "SelfCheck",
                f"workers and learner differ by {review.gap_nats:.2g} nats per token; at most"
                f" {review.limit_nats:.2g} is expected",
            )
        elif agreed and review.is_exceeded:
            self.troubles.tell("EnginesDisagree", message)
        elif not agreed and not review.is_exceeded:
            gap = f"{review.gap_nats:.2g}"
            self.troubles.tell("EnginesAgree", f"workers and learner differ by {gap} nats again")
        self.signals.mismatch = review.message if review.is_exceeded else ""

    def record(self, review: MismatchReview) -> dict[str, Any]:
        """Return what a step record holds of the comparison; empty before there is one."""
        if review.gap_nats is None:
            return {}
        gaps = {name: each.value for name, each in review.gaps.items()}
        largest = sorted(gaps, key=lambda name: gaps[name], reverse=True)[:_NAMED_WORKERS]
        numbers = {
            "gap_nats": review.gap_nats,
            "gap_p99_nats": review.gap_p99_nats,
            "divergence_nats": review.divergence_nats,
            "scale_error": review.scale_error,
            "limit_nats": review.limit_nats,
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
        }

    def _by_engine(self, gaps: Mapping[str, float]) -> dict[str, float]:
        engines = {each.name: each.engine_name for each in self.spec.rollouts}
        for each in self.dispatcher.registry.workers():
            if each.rollout_group in engines:
                self._engines[each.worker_id] = engines[each.rollout_group]
        self._engines = {name: each for name, each in self._engines.items() if name in gaps}
        found: dict[str, list[float]] = {}
        for name, engine in self._engines.items():
            found.setdefault(engine, []).append(gaps[name])
        return {engine: _finite(lower_median(each)) for engine, each in sorted(found.items())}


def _finite(value: float) -> float:
    return value if abs(value) <= _LARGEST_NATS else _LARGEST_NATS  # also of NaN
