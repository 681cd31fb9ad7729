"""Schema of `status`: what the operator reports, and the little it needs after a restart."""

from __future__ import annotations

from typing import Any, Final

from vcpo_operator.observed.pod_causes import MAX_LOG_TAIL_CHARACTERS

Schema = dict[str, Any]

MAX_CONDITIONS: Final = 16
MAX_MESSAGE_CHARACTERS: Final = 1024
_LARGEST_INTEGER = 2**53
"""Largest integer that every JSON reader holds exactly."""


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


def _text(description: str, longest: int) -> Schema:
    return {"type": "string", "maxLength": longest, "description": description}


def _time(description: str) -> Schema:
    return {"type": "string", "format": "date-time", "description": description}


def _fields(description: str, **properties: Schema) -> Schema:
    return {"type": "object", "description": description, "properties": properties}


def _map_list(description: str, key: str, longest: int, items: Schema) -> Schema:
    return {
        "type": "array",
        "description": description,
        "maxItems": longest,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": [key],
        "items": items,
    }


def _condition() -> Schema:
    item = _fields(
        "One statement about the run.",
        type=_text("What it is about.", 64),
        status={
            "type": "string",
            "enum": ["True", "False", "Unknown"],
            "description": "Whether it holds.",
        },
        reason=_text("Why, in one word.", 64),
        message=_text("Why, in a sentence.", MAX_MESSAGE_CHARACTERS),
        lastTransitionTime=_time("When `status` changed last."),
        observedGeneration=_count("Generation of the spec it was judged against."),
    )
    item["required"] = ["type", "status", "reason", "message", "lastTransitionTime"]
    return item


def _termination() -> Schema:
    item = _fields(
        "How the learner's container ended last; stays when the pod is gone.",
        pod=_text("Name of its pod.", 253),
        exitCode=_count("Its exit code."),
        reason=_text("Why, in one word.", 64),
        message=_text("The last lines of its log, where it failed.", MAX_LOG_TAIL_CHARACTERS),
        finishedTime=_time("When it ended."),
    )
    item["required"] = ["pod", "exitCode", "reason"]
    return item


def _group() -> Schema:
    item = _fields(
        "Workers of one rollout group.",
        name=_text("Name of the group.", 20),
        desiredReplicas=_count("Workers wanted by the control loop."),
        replicas=_count("Workers that the Deployment asks for."),
        readyReplicas=_count("Workers that answer."),
        lastScaleTime=_time("When the number of workers was changed last."),
    )
    item["required"] = ["name"]
    return item


def status_schema() -> Schema:
    """Schema of the `status` subresource."""
    return _fields(
        "What the operator observed and decided.",
        observedGeneration=_count("Generation of the spec that this status speaks of."),
        conditions=_map_list("What holds of the run.", "type", MAX_CONDITIONS, _condition()),
        startTime=_time("When the run was started, resumed or tried again last."),
        admissionTime=_time(
            "When the learner and a worker first had a node since then; deadlines count from here."
        ),
        firstStepTime=_time("When the first optimizer step since then was seen."),
        completionTime=_time("When the run ended; its time to live counts from here."),
        drainTime=_time("Since when the learner is waited for to end, before its workers go."),
        step=_count("Optimizer steps taken."),
        policyVersion=_count("Newest policy version published."),
        essRatio=_ratio("Effective sample size of the last step over its batch size."),
        learningRateScale=_ratio("Factor on the base learning rate in the last step."),
        evaluationAccuracy={
            "type": "number",
            "format": "double",
            "description": "Mean reward of the newest evaluation; in the units of the environment.",
        },
        admissionLagSteps=_count("Lag limit in force for new work and for what is trained on."),
        lag=_fields(
            "Age of the tokens of the last step, in policy versions.",
            p50=_count("Median."),
            max=_count("Largest."),
        ),
        learner=_fields(
            "The learner's pod.",
            restarts=_count("Times its container ended and was started again."),
            podUid=_text("Pod that `podRestarts` speaks of.", 64),
            podRestarts=_count("Restarts of that pod counted already."),
            restartsInARow=_count("Restarts since it last got further than before."),
            furthestStep=_count("The furthest step that it had taken when it was restarted."),
            lastTermination=_termination(),
        ),
        rollouts=_map_list("Groups of rollout workers.", "name", 8, _group()),
        workers=_text("Rollout workers, ready/desired.", 16),
        updateTime=_time("When this was written; numbers alone are written every 30 s at most."),
        control={
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "description": "State of the control loop, for the operator after a restart. No API.",
        },
    )
