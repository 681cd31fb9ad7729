"""Conditions of the control loop: types, reasons and messages that programs may match on."""

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
    """One condition of a run as it is now, without its history."""

    type: str
    status: str
    reason: str
    message: str
    """One sentence for the user. It contains no measured number, so it changes only with the
    reason, and the operator need not write the status at every poll."""


_GOOD = {Reason.FRESH, Reason.ABOVE_FLOOR, Reason.RECOVERING, Reason.BALANCED, Reason.SATURATED}
_GOOD |= {Reason.SCALING_DOWN, Reason.AT_MINIMUM, Reason.OK, Reason.WARN}
_UNKNOWN = {Reason.NO_SIGNALS, Reason.NO_STEP_YET}
_MESSAGES: dict[ConditionType, dict[Reason, str]] = {
    ConditionType.SIGNALS_FRESH: {
        Reason.FRESH: "The learner's signals are fresh.",
        Reason.STALE: "The signals are older than a minute: replicas and lag limit stay.",
        Reason.MISSING: "The learner reports no signals: replicas and lag limit stay.",
    },
    ConditionType.ESS_HEALTHY: {
        Reason.NO_SIGNALS: "The ESS is unknown without fresh signals.",
        Reason.NO_STEP_YET: "The learner has not measured an ESS since it started.",
        Reason.ABOVE_FLOOR: "The ESS is above its floor, and the lag limit is"
        " `algorithm.maxPolicyLagSteps`.",
        Reason.RECOVERING: "The ESS is above its floor again; the lag limit is still reduced"
        " and rises slowly.",
        Reason.BELOW_FLOOR: "The ESS is below `control.essFloorRatio` of the on-policy ratio:"
        " the lag limit is halved.",
    },
    ConditionType.LEARNER_FED: {
        Reason.NO_SIGNALS: "The learner's waiting time is unknown without fresh signals.",
        Reason.NO_STEP_YET: "The learner has taken no step since it started; before the first"
        " step it always waits.",
        Reason.BALANCED: "Generation and training are equally fast.",
        Reason.SATURATED: "The workers generate more than the learner can use; some are removed"
        " after the cool-down.",
        Reason.SCALING_DOWN: "The workers generate more than the learner can use: some are"
        " removed.",
        Reason.AT_MINIMUM: "The workers generate more than the learner can use; fewer are not"
        " allowed or starved it.",
        Reason.SCALING_UP: "The learner waits for data: workers are added.",
        Reason.COOLING_DOWN: "The learner waits for data; workers are added after the cool-down"
        " and the next step.",
        Reason.WORKERS_PENDING: "The learner waits for data, and requested workers are not"
        " ready yet.",
        Reason.AT_MAXIMUM: "The learner waits for data, and every group is at `maxReplicas`:"
        " raise it if possible.",
        Reason.ADMISSION_BOUND: "The learner waits for data, but all work that the lag limit"
        " admits is already leased.",
        Reason.ESS_LOW: "The learner waits for data, but the ESS is too low for more off-policy"
        " data.",
        Reason.LAG_HIGH: "The learner waits for data, but the lag is too high for more workers.",
    },
    ConditionType.STABLE: {
        Reason.NO_SIGNALS: "The early warning is unknown without fresh signals.",
        Reason.NO_STEP_YET: "The learner has taken no step since it started, so there is no"
        " early warning yet.",
        Reason.OK: "The early warning sees no sign of a collapse.",
        Reason.WARN: "The batches are far off policy: watch the lag and the ESS.",
        Reason.CRITICAL: "Runs look like this shortly before a collapse: lower the lag or the"
        " learning rate.",
        Reason.DEAD: "The run learns nothing any more: go back to a checkpoint.",
        Reason.ROLLED_BACK: "The run collapsed, and went back to its last good checkpoint at"
        " half the learning rate.",
    },
}


def condition(kind: ConditionType, reason: Reason) -> Condition:
    """Return the condition of this type with this reason."""
    status = ConditionStatus.TRUE if reason in _GOOD else ConditionStatus.FALSE
    if reason in _UNKNOWN:
        status = ConditionStatus.UNKNOWN
    return Condition(type=kind, status=status, reason=reason, message=_MESSAGES[kind][reason])
