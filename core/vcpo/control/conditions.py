"""Conditions: what the control loop says about a run, in words that programs may lean on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ConditionType(StrEnum):
    """What a condition is about; `True` is the good state of each."""

    SIGNALS_FRESH = "SignalsFresh"
    """The learner's signals are there and new enough to act on."""
    ESS_HEALTHY = "EssHealthy"
    """The effective sample size is above its floor."""
    LEARNER_FED = "LearnerFed"
    """The learner gets as many trajectories as it can use."""


class ConditionStatus(StrEnum):
    """Truth of a condition, as Kubernetes writes it."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    """Why a condition has its status."""

    FRESH = "Fresh"
    STALE = "Stale"
    MISSING = "Missing"

    NO_SIGNALS = "NoSignals"
    NO_STEP_YET = "NoStepYet"

    ABOVE_FLOOR = "AboveFloor"
    RECOVERING = "Recovering"
    BELOW_FLOOR = "BelowFloor"

    BALANCED = "Balanced"
    SATURATED = "Saturated"
    SCALING_DOWN = "ScalingDown"
    AT_MINIMUM = "AtMinimum"
    SCALING_UP = "ScalingUp"
    COOLING_DOWN = "CoolingDown"
    WORKERS_PENDING = "WorkersPending"
    AT_MAXIMUM = "AtMaximum"
    ADMISSION_BOUND = "AdmissionBound"
    ESS_LOW = "EssLow"
    LAG_HIGH = "LagHigh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One statement about a run."""

    type: ConditionType
    status: ConditionStatus
    reason: Reason
    message: str
    """One sentence for people. It holds no measured number, so that it changes with the reason
    only and a status that repeats it is not rewritten at every poll."""


_MEANINGS: dict[tuple[ConditionType, Reason], tuple[ConditionStatus, str]] = {
    (ConditionType.SIGNALS_FRESH, Reason.FRESH): (
        ConditionStatus.TRUE,
        "The learner's signals are fresh.",
    ),
    (ConditionType.SIGNALS_FRESH, Reason.STALE): (
        ConditionStatus.FALSE,
        "The learner's signals are older than `control.signalsMaxAgeSeconds`: everything is held.",
    ),
    (ConditionType.SIGNALS_FRESH, Reason.MISSING): (
        ConditionStatus.FALSE,
        "The learner gives no signals: everything is held.",
    ),
    (ConditionType.ESS_HEALTHY, Reason.NO_SIGNALS): (
        ConditionStatus.UNKNOWN,
        "Nothing is known of the ESS without fresh signals.",
    ),
    (ConditionType.ESS_HEALTHY, Reason.NO_STEP_YET): (
        ConditionStatus.UNKNOWN,
        "The learner has not measured an ESS since it started.",
    ),
    (ConditionType.ESS_HEALTHY, Reason.ABOVE_FLOOR): (
        ConditionStatus.TRUE,
        "The ESS is above its floor and admission is as wide as the algorithm allows.",
    ),
    (ConditionType.ESS_HEALTHY, Reason.RECOVERING): (
        ConditionStatus.TRUE,
        "The ESS is above its floor again; admission is still tightened and relaxes slowly.",
    ),
    (ConditionType.ESS_HEALTHY, Reason.BELOW_FLOOR): (
        ConditionStatus.FALSE,
        "The ESS is below `control.essFloorRatio` of the on-policy ratio: the lag limit is halved.",
    ),
    (ConditionType.LEARNER_FED, Reason.NO_SIGNALS): (
        ConditionStatus.UNKNOWN,
        "Nothing is known of the learner's waiting without fresh signals.",
    ),
    (ConditionType.LEARNER_FED, Reason.NO_STEP_YET): (
        ConditionStatus.UNKNOWN,
        "The learner has made no step since it started; until then waiting is normal.",
    ),
    (ConditionType.LEARNER_FED, Reason.BALANCED): (
        ConditionStatus.TRUE,
        "Generation and training keep pace.",
    ),
    (ConditionType.LEARNER_FED, Reason.SATURATED): (
        ConditionStatus.TRUE,
        "There is more data than the learner can use; workers go after the cool-down.",
    ),
    (ConditionType.LEARNER_FED, Reason.SCALING_DOWN): (
        ConditionStatus.TRUE,
        "There is more data than the learner can use: workers are removed.",
    ),
    (ConditionType.LEARNER_FED, Reason.AT_MINIMUM): (
        ConditionStatus.TRUE,
        "There is more data than the learner can use; fewer workers are not allowed or starved it.",
    ),
    (ConditionType.LEARNER_FED, Reason.SCALING_UP): (
        ConditionStatus.FALSE,
        "The learner waits for data: workers are added.",
    ),
    (ConditionType.LEARNER_FED, Reason.COOLING_DOWN): (
        ConditionStatus.FALSE,
        "The learner waits for data; workers come after the cool-down and the next step.",
    ),
    (ConditionType.LEARNER_FED, Reason.WORKERS_PENDING): (
        ConditionStatus.FALSE,
        "The learner waits for data and workers asked for are not ready yet.",
    ),
    (ConditionType.LEARNER_FED, Reason.AT_MAXIMUM): (
        ConditionStatus.FALSE,
        "The learner waits for data and every group is at `maxReplicas`: raise it if you can.",
    ),
    (ConditionType.LEARNER_FED, Reason.ADMISSION_BOUND): (
        ConditionStatus.FALSE,
        "The learner waits for data, but all work that the lag bound admits is handed out already.",
    ),
    (ConditionType.LEARNER_FED, Reason.ESS_LOW): (
        ConditionStatus.FALSE,
        "The learner waits for data, but the ESS has no room for more of it off-policy.",
    ),
    (ConditionType.LEARNER_FED, Reason.LAG_HIGH): (
        ConditionStatus.FALSE,
        "The learner waits for data, but the lag has no room for more workers.",
    ),
}


def condition(kind: ConditionType, reason: Reason) -> Condition:
    """The condition of a kind that holds for a reason.

    Raises: KeyError when the reason does not belong to the kind, which is a bug.
    """
    status, message = _MEANINGS[kind, reason]
    return Condition(type=kind, status=status, reason=reason, message=message)
