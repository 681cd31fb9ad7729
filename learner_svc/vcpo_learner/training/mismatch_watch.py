"""Compares workers with the learner: the audit after a start, and workers at fault after a step."""

from __future__ import annotations

from vcpo.algo import MISMATCH_CEILING, FreshTokens, MismatchError, audit_mismatch
from vcpo.records.reasons import SetAsideCause
from vcpo_learner.training.parts import TrainingParts
from vcpo_learner.update.result import UpdateResult


class MismatchWatch:
    """Ends the run or sets workers aside where they do not compute the learner's policy.

    Owner: the learner's event loop.
    """

    def __init__(self, parts: TrainingParts) -> None:
        self._parts = parts
        self._limit_nats = parts.run.spec.mismatch_limit_nats
        self._patience_s = parts.run.spec.failure_policy.failure_tolerance_seconds
        self._audited: dict[str, FreshTokens] | None = {}
        """Fresh tokens of the steps since the start, by worker; None after the audit."""
        self._first_shown_s: float | None = None
        """Time of the first of them."""
        self._is_wait_reported = False
        self._engines_disagree = False
        """Whether the last event says so."""

    def after_step(self, result: UpdateResult) -> None:
        """Act on the fresh tokens of a step, before its version is published.

        Raises:
            MismatchError: if workers and learner do not compute the same policy, after a start.
        """
        self._audit(result)
        for fault in result.mismatch.at_fault:
            self._set_aside(fault.worker, fault.message)
        if result.mismatch.engines_disagree != self._engines_disagree:
            self._engines_disagree = not self._engines_disagree
            self._parts.event("EnginesDisagree", self._disagreement())

    def _audit(self, result: UpdateResult) -> None:
        """Compare all workers once after every start, as soon as there are enough tokens."""
        if self._audited is None or not (self._audited or result.fresh):
            return
        for worker, fresh in result.fresh.items():
            self._audited[worker] = self._audited.get(worker, FreshTokens()) + fresh
        try:
            gap = audit_mismatch(self._audited, self._limit_nats, num_awaited=self._num_awaited())
        except MismatchError as error:
            self._parts.event("SelfCheckFailed", str(error))
            raise
        if gap is None:
            self._report_wait()
            return
        self._parts.event("SelfCheck", f"workers and learner differ by {gap:.2g} nats per token")
        for worker, fresh in self._audited.items():
            if fresh.is_enough and self._is_far(fresh):
                self._set_aside(
                    worker,
                    f"it differs from the learner by {fresh.mean_gap:.3g} nats per token on"
                    f" {fresh.num_tokens} fresh tokens, and other workers by {gap:.2g}; at most"
                    f" {self._limit_nats:g} is expected; compare its temperature, its precision,"
                    " its quantization and its masked logits with theirs",
                )
        self._audited = None

    def _report_wait(self) -> None:
        """Say once that a worker exceeds the limit and that others are waited for."""
        found = self._audited or {}
        far = [name for name, fresh in found.items() if fresh.is_enough and self._is_far(fresh)]
        if far and not self._is_wait_reported:
            self._is_wait_reported = True
            gap = found[far[0]].mean_gap
            self._parts.event(
                "SelfCheckWaits",
                f"{far[0]} differs from the learner by {gap:.3g} nats per token; at most"
                f" {self._limit_nats:g} is expected. The run is judged when the others of its"
                f" {self._parts.run.spec.workers_at_start} workers have shown fresh tokens too, or"
                f" after {self._patience_s:g} s (failurePolicy.failureToleranceSeconds)",
            )

    def _is_far(self, fresh: FreshTokens) -> bool:
        return not fresh.mean_gap <= self._limit_nats  # true of NaN as well

    def _num_awaited(self) -> int:
        """Return how many of the workers with which the run starts have yet to show fresh tokens.

        After the time for which failures may last nobody is waited for.
        """
        if self._first_shown_s is None:
            self._first_shown_s = self._parts.clock()
        spec, audited = self._parts.run.spec, self._audited or {}
        lasted_s = self._parts.clock() - self._first_shown_s
        if lasted_s >= self._patience_s:
            return 0
        return max(0, spec.workers_at_start - len(audited))

    def _set_aside(self, worker: str, message: str) -> None:
        if worker:  # a name that no worker has cannot be set aside
            self._parts.dispatcher.set_aside(worker, SetAsideCause.MISMATCH, message)

    def _disagreement(self) -> str:
        if not self._engines_disagree:
            return "the mismatch of some workers is again one that rounding may explain"
        return (
            f"every worker differs from the learner by more than {MISMATCH_CEILING:g} nats^2 per"
            " token at equal versions: no number format explains that. No worker is set aside,"
            " because none would be left. What exceeds the limit counts as staleness, so the"
            " learning rate is low. Compare temperature, precision, quantization, noise and masked"
            " logits of the rollout groups with the learner's"
        )
