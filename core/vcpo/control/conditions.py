"""Conditions of the control loop: types, reasons and messages that programs may match on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ConditionType(StrEnum):
    """Type of a condition; status `True` is the good state of every type."""

    SIGNALS_FRESH = "SignalsFresh"
    """The learner reports signals, and they are recent enough to act on."""
    ESS_HEALTHY = "EssHealthy"
    """The effective sample size is above its floor."""
    LEARNER_FED = "LearnerFed"
    """The learner gets as many trajectories as it can use."""
    STABLE = "Stable"
    """The early warning sees no collapse coming."""


class ConditionStatus(StrEnum):
    """Status of a condition, in the spelling of Kubernetes."""

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

    OK = "Ok"
    WARN = "Warn"
    CRITICAL = "Critical"
    DEAD = "Dead"
    ROLLED_BACK = "RolledBack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition of a run."""

    type: ConditionType
    status: ConditionStatus
    reason: Reason
    message: str
    """One sentence for the user. It contains no measured number, so it changes only with the
    reason, and the operator need not write the status at every poll."""


_MEANINGS: dict[tuple[ConditionType, Reason], tuple[ConditionStatus, str]] = {
    (ConditionType.SIGNALS_FRESH, Reason.FRESH): (
        ConditionStatus.TRUE,
        "The learner's signals are fresh.",
    ),
    (ConditionType.SIGNALS_FRESH, Reason.STALE): (
        ConditionStatus.FALSE,
        "The signals are older than a minute: replicas and lag limit stay.",
    ),
    (ConditionType.SIGNALS_FRESH, Reason.MISSING): (
        ConditionStatus.FALSE,
        "The learner reports no signals: replicas and lag limit stay.",
    ),
    (ConditionType.ESS_HEALTHY, Reason.NO_SIGNALS): (
        ConditionStatus.UNKNOWN,
        "The ESS is unknown without fresh signals.",
    ),
    (ConditionType.ESS_HEALTHY, Reason.NO_STEP_YET): (
        ConditionStatus.UNKNOWN,
        "The learner has not measured an ESS since it started.",
    ),
    (ConditionType.ESS_HEALTHY, Reason.ABOVE_FLOOR): (
        ConditionStatus.TRUE,
        "The ESS is above its floor, and the lag limit is `algorithm.maxPolicyLagSteps`.",
    ),
    (ConditionType.ESS_HEALTHY, Reason.RECOVERING): (
        ConditionStatus.TRUE,
        "The ESS is above its floor again; the lag limit is still reduced and rises slowly.",
    ),
    (ConditionType.ESS_HEALTHY, Reason.BELOW_FLOOR): (
        ConditionStatus.FALSE,
        "The ESS is below `control.essFloorRatio` of the on-policy ratio: the lag limit is halved.",
    ),
    (ConditionType.LEARNER_FED, Reason.NO_SIGNALS): (
        ConditionStatus.UNKNOWN,
        "The learner's waiting time is unknown without fresh signals.",
    ),
    (ConditionType.LEARNER_FED, Reason.NO_STEP_YET): (
        ConditionStatus.UNKNOWN,
        "The learner has taken no step since it started; before the first step it always waits.",
    ),
    (ConditionType.LEARNER_FED, Reason.BALANCED): (
        ConditionStatus.TRUE,
        "Generation and training are equally fast.",
    ),
    (ConditionType.LEARNER_FED, Reason.SATURATED): (
        ConditionStatus.TRUE,
        "The workers generate more than the learner can use; some are removed after the cool-down.",
    ),
    (ConditionType.LEARNER_FED, Reason.SCALING_DOWN): (
        ConditionStatus.TRUE,
        "The workers generate more than the learner can use: some are removed.",
    ),
    (ConditionType.LEARNER_FED, Reason.AT_MINIMUM): (
        ConditionStatus.TRUE,
        "The workers generate more than the learner can use; fewer are not allowed or starved it.",
    ),
    (ConditionType.LEARNER_FED, Reason.SCALING_UP): (
        ConditionStatus.FALSE,
        "The learner waits for data: workers are added.",
    ),
    (ConditionType.LEARNER_FED, Reason.COOLING_DOWN): (
        ConditionStatus.FALSE,
        "The learner waits for data; workers are added after the cool-down and the next step.",
    ),
    (ConditionType.LEARNER_FED, Reason.WORKERS_PENDING): (
        ConditionStatus.FALSE,
        "The learner waits for data, and requested workers are not ready yet.",
    ),
    (ConditionType.LEARNER_FED, Reason.AT_MAXIMUM): (
        ConditionStatus.FALSE,
        "The learner waits for data, and every group is at `maxReplicas`: raise it if possible.",
    ),
    (ConditionType.LEARNER_FED, Reason.ADMISSION_BOUND): (
        ConditionStatus.FALSE,
        "The learner waits for data, but all work that the lag limit admits is already leased.",
    ),
    (ConditionType.LEARNER_FED, Reason.ESS_LOW): (
        ConditionStatus.FALSE,
        "The learner waits for data, but the ESS is too low for more off-policy data.",
    ),
    (ConditionType.LEARNER_FED, Reason.LAG_HIGH): (
        ConditionStatus.FALSE,
        "The learner waits for data, but the lag is too high for more workers.",
    ),
    (ConditionType.STABLE, Reason.NO_SIGNALS): (
        ConditionStatus.UNKNOWN,
        "The early warning is unknown without fresh signals.",
    ),
    (ConditionType.STABLE, Reason.NO_STEP_YET): (
        ConditionStatus.UNKNOWN,
        "The learner has taken no step since it started, so there is no early warning yet.",
    ),
    (ConditionType.STABLE, Reason.OK): (
        ConditionStatus.TRUE,
        "The early warning sees no sign of a collapse.",
    ),
    (ConditionType.STABLE, Reason.WARN): (
        ConditionStatus.TRUE,
        "The batches are far off policy: watch the lag and the ESS.",
    ),
    (ConditionType.STABLE, Reason.CRITICAL): (
        ConditionStatus.FALSE,
        "Runs look like this shortly before a collapse: lower the lag or the learning rate.",
    ),
    (ConditionType.STABLE, Reason.DEAD): (
        ConditionStatus.FALSE,
        "The run learns nothing any more: go back to a checkpoint.",
    ),
    (ConditionType.STABLE, Reason.ROLLED_BACK): (
        ConditionStatus.FALSE,
        "The run collapsed, and went back to its last good checkpoint at half the learning rate.",
    ),
}


def condition(kind: ConditionType, reason: Reason) -> Condition:
    """Return the condition of this type with this reason."""
    status, message = _MEANINGS[kind, reason]
    return Condition(type=kind, status=status, reason=reason, message=message)
