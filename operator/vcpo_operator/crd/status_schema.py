"""The schema of `status`: what the operator reports, and what it needs after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.control.limits import ChangeKind
from vcpo_operator.observed.pod_causes import MAX_LOG_TAIL_CHARACTERS

Schema = dict[str, Any]

MAX_CONDITIONS: Final = 16
MAX_MESSAGE_CHARACTERS: Final = 1024
_MAX_PODS: Final = 1024
_LARGEST_INTEGER = 2**53
"""Largest integer that every JSON parser represents exactly."""


def _count(description: str) -> Schema:
    return {
        "type": "integer",
        "format": "int64",
        "minimum": 0,
        "maximum": _LARGEST_INTEGER,
        "description": description,
    }


def _ratio(description: str) -> Schema:
    return {
        "type": "number",
        "format": "double",
        "minimum": 0,
        "maximum": 1,
        "description": description,
    }


def _number(description: str) -> Schema:
    return {"type": "number", "format": "double", "description": description}


def _text(description: str, longest: int) -> Schema:
    return {"type": "string", "maxLength": longest, "description": description}


def _time(description: str) -> Schema:
    return {"type": "string", "format": "date-time", "description": description}


def _fields(description: str, *, required: Sequence[str] = (), **properties: Schema) -> Schema:
    schema = {"type": "object", "description": description, "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def _uids(description: str) -> Schema:
    return {
        "type": "array",
        "description": description,
        "maxItems": _MAX_PODS,
        "x-kubernetes-list-type": "set",
        "items": _text("Uid of a pod.", 64),
    }


def _map_list(description: str, key: str, longest: int, items: Schema) -> Schema:
    return {
        "type": "array",
        "description": description,
        "maxItems": longest,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": [key],
        "items": items,
    }


_CONDITION: Final = _fields(
    "One condition of the run.",
    required=("type", "status", "reason", "message", "lastTransitionTime"),
    type=_text("Type of the condition.", 64),
    status={
        "type": "string",
        "enum": ["True", "False", "Unknown"],
        "description": "Whether the condition holds.",
    },
    reason=_text("Cause of the status, one word.", 64),
    message=_text("Cause of the status, one sentence.", MAX_MESSAGE_CHARACTERS),
    lastTransitionTime=_time("Time at which `status` changed last."),
    observedGeneration=_count("Generation of the spec that the condition is about."),
)

_TERMINATION: Final = _fields(
    "How the learner's container ended last; kept after the pod is gone.",
    required=("pod", "exitCode", "reason"),
    pod=_text("Name of the pod.", 253),
    exitCode=_count("Exit code."),
    reason=_text("Reason that the kubelet gave, one word.", 64),
    message=_text("Last lines of the log, if the container failed.", MAX_LOG_TAIL_CHARACTERS),
    finishedTime=_time("Time at which it ended."),
)

_FOLLOWER: Final = _fields(
    "A pod of the learner other than the first.",
    required=("uid",),
    uid=_text("Uid of the pod.", 64),
    restarts=_count("Restarts of the pod that `restarts` of the learner includes."),
)

_DECISION: Final = _fields(
    "The newest change of the lag limit by the control loop.",
    required=("time", "kind", "from", "to", "reason"),
    time=_time("Time of the decision."),
    kind={
        "type": "string",
        "enum": [ChangeKind.THROTTLED.value, ChangeKind.RELAXED.value],
        "description": "Whether the lag limit fell or rose.",
    },
    **{
        "from": _count("Lag limit before, in policy versions."),
        "to": _count("Lag limit after, in policy versions."),
    },
    reason=_text("Why, with the measured number.", MAX_MESSAGE_CHARACTERS),
)

_GROUP: Final = _fields(
    "Workers of one rollout group.",
    required=("name",),
    name=_text("Name of the group.", 20),
    desiredReplicas=_count("Workers that the control loop wants."),
    replicas=_count("Workers that the Deployment requests."),
    readyReplicas=_count("Workers that are ready."),
    lastScaleTime=_time("Time at which the desired number changed last."),
)

_LEARNER: Final = _fields(
    "The learner's pods.",
    pods=_text("Pods of the learner, ready/desired.", 16),
    restarts=_count("Restarts of the learner; of several pods at once they are one."),
    podUid=_text("Uid of the first pod, which `podRestarts` is about.", 64),
    podRestarts=_count("Restarts of that pod that `restarts` includes."),
    followers=_map_list("The other pods.", "uid", _MAX_PODS, _FOLLOWER),
    group=_uids("Uids of the pods that train together; empty until all have met."),
    replaced=_uids("Uids of pods to delete, because one of their group has ended."),
    restartsInARow=_count("Restarts in a row without progress."),
    furthestStep=_count("Furthest step at a restart; a later step is progress."),
    lastTermination=_TERMINATION,
)
_LEARNING_RATE: Final = _fields(
    "Learning rate of the last step that made an update: the spec's times the factors.",
    effective=_number("The rate."),
    schedule=_ratio("Factor of warm-up and schedule."),
    scale=_ratio("Factor of the ESS or of the trust region."),
    backoff=_ratio("Factor that critical warnings and rollbacks have left."),
)
_WARNING: Final = _fields(
    "Early warning of a collapse after the last step.",
    level={
        "type": "string",
        "enum": list(map(str, WarningLevel)),
        "description": "How near a collapse seems; `critical` is shortly before one.",
    },
    score=_ratio("Severity of the worst sign: 1/3 warns, 2/3 is critical, 1 is dead."),
)


def status_schema() -> Schema:
    """Return the schema of the `status` subresource."""
    return _fields(
        "What the operator observed and decided.",
        observedGeneration=_count("Generation of the spec that this status is about."),
        conditions=_map_list("Conditions, by type.", "type", MAX_CONDITIONS, _CONDITION),
        reason=_text("Why the run trains or not, one word: the cause behind Ready.", 64),
        verdict=_text(
            "What is the matter with the run and what to do, by the learner's last signals.",
            MAX_MESSAGE_CHARACTERS,
        ),
        startTime=_time("Time of the last start, resumption or retry."),
        admissionTime=_time(
            "First time since `startTime` at which the learner and a worker had a node; deadlines"
            " count from it."
        ),
        firstStepTime=_time("Time at which the first step since `startTime` was observed."),
        completionTime=_time("Time of the end; `ttlSecondsAfterFinished` counts from it."),
        drainTime=_time("Time since which the operator waits for the learner to end."),
        step=_count("Optimizer steps taken."),
        policyVersion=_count("Newest published policy version."),
        essRatio=_ratio("Effective sample size (ESS) of the last step over its batch size."),
        onPolicyEssRatio=_ratio("ESS ratio that on-policy data would have; ESS is judged by it."),
        rewardMean=_number("Mean reward of recent steps, in the environment's units."),
        tokensPerSecond=_number("Response tokens that the learner accepts per second."),
        trajectories=_fields(
            "Trajectories outside of training.",
            buffered=_count("Trajectories that wait for training."),
            inFlight=_count("Trajectories that workers generate."),
        ),
        learningRate=_LEARNING_RATE,
        evaluationAccuracy=_number(
            "Mean reward of the newest evaluation, in the environment's units."
        ),
        admissionLagSteps=_count("Lag limit in force, in policy versions."),
        lastDecision=_DECISION,
        lag=_fields(
            "Token lag of the last step, in policy versions.",
            p50=_count("Median lag."),
            max=_count("Largest lag."),
        ),
        warning=_WARNING,
        learner=_LEARNER,
        rollouts=_map_list("Groups of rollout workers.", "name", 8, _GROUP),
        workers=_text("Rollout workers, ready/desired.", 16),
        revision=_text("Name of what the run's pods are made of.", 16),
        pendingRevision=_text("Name of what they will be made of, if that is newer.", 16),
        updateTime=_time(
            "Time of this write. If only numbers changed, the status is written every 30 s at most."
        ),
        control={
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "description": "State of the control loop, for a restarted operator. Not an API.",
        },
    )
