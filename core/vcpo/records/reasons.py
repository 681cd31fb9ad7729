"""Closed sets of words that records, signals, metrics and reports share."""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final, Self


class RunPhase(StrEnum):
    r"""Phase of a run, as the learner reports it to workers and host.

    ```
    running --> complete
       |  \--> failed
       v
    draining (ends with a checkpoint; a resumed run is running again)
    ```
    """

    RUNNING = "running"
    DRAINING = "draining"
    COMPLETE = "complete"
    FAILED = "failed"


class SkipReason(StrEnum):
    """Why a step was not taken."""

    NON_FINITE_WEIGHT = "non_finite_weight"
    """An importance weight or a gradient norm is not a number, or every weight is 0."""
    NON_FINITE_GRADIENT = "non_finite_gradient"
    """The gradient or its norm is not a number."""
    LOW_ESS = "low_ess"
    """The ESS ratio is below the share of the on-policy ratio that `refuseBelow` allows."""
    NO_GRADIENT = "no_gradient"
    """No trajectory has a gradient, for example when the rewards of every prompt are equal."""


class DropReason(StrEnum):
    """Why trajectories were dropped and not trained on."""

    LEASE_EXPIRED = "lease_expired"
    """The worker did not submit before the lease expired."""
    RELEASED = "released"
    """The worker shut down or ran out of time, or its host reported it dead."""
    GENERATION_FAILED = "generation_failed"
    """The worker reported a typed failure."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt never fits into the model's context; it is given up at once."""
    LAG_EXCEEDED = "lag_exceeded"
    """A token was, or was certain to be, older than `maxPolicyLagSteps` at the group's turn."""
    THROTTLED = "throttled"
    """A token was older than the throttled lag limit, but not than `maxPolicyLagSteps`."""
    NO_SIGNAL = "no_signal"
    """All rewards of the group were equal, and the method uses dynamic sampling."""
    SURPLUS = "surplus"
    """The batch was complete, so the lease was preempted; the prompt's next lease resumes the
    responses."""
    WORKER_SET_ASIDE = "worker_set_aside"
    """The worker that had or submitted it was set aside; the prompt is granted again."""
    QUARANTINED = "quarantined"
    """An update failed because of its group."""
    LEARNER_RESTARTED = "learner_restarted"
    """The trajectory was in flight when the learner stopped."""
    ROLLED_BACK = "rolled_back"
    """The version that sampled it, or trained on it, was given up by a rollback."""


_DROP_WORDS: dict[str, str] = {
    DropReason.GENERATION_FAILED: "failed",
    DropReason.LAG_EXCEEDED: "too old",
    DropReason.THROTTLED: "too old for the throttle",
    DropReason.NO_SIGNAL: "equal rewards",
    DropReason.SURPLUS: "more than a batch",
}


def drop_words(reason: str) -> str:
    """Return a reason of a record in words for people."""
    return _DROP_WORDS.get(reason, reason.replace("_", " "))


class SetAsideCause(StrEnum):
    """Why the learner took a worker out of the run."""

    FAILING = "failing"
    """Its generations fail where those of other workers succeed."""
    MISMATCH = "mismatch"
    """Its log-probabilities are not those of the policy that it names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdates:
    """Numbers of policy versions that workers took."""

    in_flight: int = 0
    """Versions swapped in while sequences were being generated."""
    adapter_swaps: int = 0
    """Versions whose LoRA adapters an engine serves beside a base model."""
    merged: int = 0
    """Versions whose LoRA adapters a worker merged into full sets of weights."""

    def __add__(self, other: Self) -> Self:
        return self._with(other, 1)

    def __sub__(self, other: Self) -> Self:
        return self._with(other, -1)

    def _with(self, other: Self, sign: int) -> Self:
        names = (each.name for each in fields(self))
        return type(self)(**{n: getattr(self, n) + sign * getattr(other, n) for n in names})


NO_UPDATES: Final = WeightUpdates()
"""The updates of a worker that has taken no version."""
