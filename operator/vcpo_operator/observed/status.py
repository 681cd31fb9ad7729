"""The status of a run: one model for the schema, the object and the code. Pure.

Times are Unix seconds here and RFC 3339 in the object, to the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    computed_field,
)
from pydantic.alias_generators import to_camel

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.control.limits import ChangeKind, LimitChange
from vcpo.control.signals import RunSignals

MAX_MESSAGE_CHARACTERS: Final = 1024
MAX_LOG_TAIL_CHARACTERS: Final = 2048
"""Length of a container's last lines; kubelets keep as many bytes of a log."""
_SMALL: Final = 0.1
"""A smaller number is rounded to digits that count; learning rates are small."""


def rfc3339(time_s: float) -> str:
    """Write a Unix time as Kubernetes does."""
    return datetime.fromtimestamp(int(time_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_rfc3339(text: str | None) -> float | None:
    """Read a time that Kubernetes wrote, as Unix time; None stays None."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


def _round(value: float) -> float:
    return round(value, 4) if abs(value) >= _SMALL else float(f"{value:.4g}")


def _list(key: str | None = None) -> dict[str, Any]:
    if key is None:
        return {"x-kubernetes-list-type": "set"}
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


Time = Annotated[
    float,
    BeforeValidator(lambda value: from_rfc3339(value) if isinstance(value, str) else value),
    PlainSerializer(rfc3339),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
Count = Annotated[int, Field(ge=0, le=2**53)]
"""Every JSON parser represents an integer up to the bound exactly."""
Number = Annotated[float, AfterValidator(_round)]
Ratio = Annotated[float, Field(ge=0, le=1), AfterValidator(_round)]
Pair = Annotated[str, Field(max_length=16)]
"""Pods, ready/desired."""
Word = Annotated[str, Field(max_length=64)]
Name = Annotated[str, Field(max_length=253)]
Sentence = Annotated[str, Field(max_length=MAX_MESSAGE_CHARACTERS)]
Uids = Annotated[tuple[Word, ...], Field(max_length=1024, json_schema_extra=_list())]


class Part(BaseModel):
    """Part of a status: camelCase in the object, snake_case here."""

    model_config = ConfigDict(
        alias_generator=to_camel, frozen=True, populate_by_name=True, use_attribute_docstrings=True
    )

    def but(self, **changes: Any) -> Self:
        return self.model_copy(update=changes)


class StatusCondition(Part):
    """One condition of the run."""

    type: Word
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: Word
    """Cause of the status, one word."""
    message: Sentence
    """Cause of the status, one sentence."""
    transition_s: Annotated[Time, Field(alias="lastTransitionTime")]
    """Time at which `status` changed last."""
    observed_generation: Count = 0
    """Generation of the spec that the condition is about."""


class ContainerEnd(Part):
    """How the learner's container ended last; kept after the pod is gone."""

    pod: Name
    """Name of the pod."""
    exit_code: Count
    """Exit code."""
    reason: Word
    """Reason that the kubelet gave, one word."""
    message: Annotated[str, Field(max_length=MAX_LOG_TAIL_CHARACTERS)] = ""
    """Last lines of the log, if the container failed."""
    end_s: Annotated[Time | None, Field(alias="finishedTime")] = None
    """Time at which it ended."""


class CountedPod(Part):
    """A pod, and how many of its restarts are counted."""

    uid: Word
    """Uid of the pod."""
    restarts: Count = 0
    """Restarts of the pod that `restarts` of the learner includes."""


class LearnerStatus(Part):
    """The learner's pods.

    Each pod counts its own restarts. The record holds how many restarts of which pod are counted
    already. Counting again then adds nothing, and a new pod counts from zero. A replaced pod is no
    restart. Restarts of several pods at once are one restart of the learner.
    """

    pods: Pair = ""
    """Pods of the learner, ready/desired."""
    restarts: Count = 0
    """Restarts of the learner; of several pods at once they are one."""
    counted: Annotated[
        tuple[CountedPod, ...], Field(max_length=1024, json_schema_extra=_list("uid"))
    ] = ()
    """The pods, with what `restarts` includes."""
    group: Uids = ()
    """Uids of the pods that train together; empty until all have met."""
    replaced: Uids = ()
    """Uids of pods to delete, because one of their group has ended."""
    failures: Annotated[Count, Field(alias="restartsInARow")] = 0
    """Restarts in a row without progress."""
    furthest_step: Count = 0
    """Furthest step at a restart; a later step is progress."""
    last_end: Annotated[ContainerEnd | None, Field(alias="lastTermination")] = None


class LastDecision(Part):
    """The newest change of the lag limit by the control loop."""

    time_s: Annotated[Time, Field(alias="time")]
    """Time of the decision."""
    kind: Literal[ChangeKind.THROTTLED, ChangeKind.RELAXED]
    """Whether the lag limit fell or rose."""
    before: Annotated[Count, Field(alias="from")]
    """Lag limit before, in policy versions."""
    after: Annotated[Count, Field(alias="to")]
    """Lag limit after, in policy versions."""
    reason: Sentence
    """Why, with the measured number."""

    @classmethod
    def of(cls, change: LimitChange) -> Self:
        return cls(
            time_s=float(int(change.decided_s)),
            kind=change.kind,
            before=change.before,
            after=change.after,
            reason=change.reason,
        )


class GroupStatus(Part):
    """Workers of one rollout group."""

    name: Annotated[str, Field(max_length=20)]
    """Name of the group."""
    desired: Annotated[Count, Field(alias="desiredReplicas")] = 0
    """Workers that the control loop wants."""
    replicas: Count = 0
    """Workers that the Deployment requests."""
    ready: Annotated[Count, Field(alias="readyReplicas")] = 0
    """Workers that are ready."""
    scaled_s: Annotated[Time | None, Field(alias="lastScaleTime")] = None
    """Time at which the desired number changed last."""


class Trajectories(Part):
    """Trajectories outside of training."""

    buffered: Count
    """Trajectories that wait for training."""
    in_flight: Count
    """Trajectories that workers generate."""


class Rate(Part):
    """Learning rate of the last step, 0 if it was skipped: the spec's times the factors."""

    effective: Number | None = None
    """The rate."""
    schedule: Ratio | None = None
    """Factor of warm-up and schedule."""
    scale: Ratio | None = None
    """Factor of the ESS or of the trust region."""
    backoff: Ratio | None = None
    """Factor that critical warnings and rollbacks have left."""


class Lag(Part):
    """Token lag of the last step, in policy versions."""

    p50: Count | None = None
    """Median lag."""
    max: Count | None = None
    """Largest lag."""


class Warned(Part):
    """Early warning of a collapse after the last step."""

    level: WarningLevel | None = None
    """How near a collapse seems; `critical` is shortly before one."""
    score: Ratio | None = None
    """Severity of the worst sign: 1/3 warns, 2/3 is critical, 1 is dead."""


class Numbers(Part):
    """The learner's last known signals, without what is not measured yet."""

    step: Count | None = None
    """Optimizer steps taken."""
    policy_version: Count | None = None
    """Newest published policy version."""
    ess_ratio: Ratio | None = None
    """Effective sample size (ESS) of the last step over its batch size."""
    on_policy_ess_ratio: Ratio | None = None
    """ESS ratio that on-policy data would have; ESS is judged by it."""
    reward_mean: Number | None = None
    """Mean reward of recent steps, in the environment's units."""
    tokens_per_second: Number | None = None
    """Response tokens that the learner accepts per second."""
    trajectories: Trajectories | None = None
    learning_rate: Rate | None = None
    evaluation_accuracy: Number | None = None
    """Mean reward of the newest evaluation, in the environment's units."""
    lag: Lag | None = None
    warning: Warned | None = None

    @classmethod
    def of(cls, signals: RunSignals) -> Numbers:
        """Return the numbers of signals."""
        known: dict[str, Any] = {
            "step": signals.step,
            "policy_version": signals.policy_version,
            "trajectories": Trajectories(buffered=signals.buffered, in_flight=signals.in_flight),
            "evaluation_accuracy": signals.accuracy,
        }
        if (last := signals.last) is None:
            return Numbers(**known)
        of_step = {
            "ess_ratio": last.ess_ratio or None,
            "on_policy_ess_ratio": last.on_policy_ess_ratio,
            "reward_mean": last.reward_mean,
            "tokens_per_second": last.tokens_per_s,
            "learning_rate": Rate(
                effective=last.learning_rate,
                schedule=last.learning_rate_schedule,
                scale=last.learning_rate_scale,
                backoff=last.learning_rate_backoff,
            ),
            "lag": Lag(p50=last.lag_p50, max=last.lag_max),
            "warning": Warned(level=signals.warning_level, score=last.warning_score),
        }
        return Numbers(**known, **of_step)


_SUMMARIES: Final = frozenset({"Initializing", "Degraded"})
"""Reasons of `Ready` that say only that something is missing."""
_NO_CAUSES: Final = frozenset(
    {"PodPending", "BelowMinimum", "Suspended", "Ended", "Missing", "Stale"}
)
"""Reasons of a missing part that say no more than that."""


class RunStatus(Numbers):
    """What the operator observed and decided."""

    observed_generation: Count = 0
    """Generation of the spec that this status is about."""
    conditions: Annotated[
        tuple[StatusCondition, ...], Field(max_length=16, json_schema_extra=_list("type"))
    ] = ()
    """Conditions, by type."""
    verdict: Sentence = ""
    """What is the matter with the run and what to do, by the learner's last signals."""
    start_s: Annotated[Time | None, Field(alias="startTime")] = None
    """Time of the last start, resumption or retry."""
    admission_s: Annotated[Time | None, Field(alias="admissionTime")] = None
    """First time since `startTime` at which the learner and a worker had a node; deadlines count
    from it."""
    first_step_s: Annotated[Time | None, Field(alias="firstStepTime")] = None
    """Time at which the first step since `startTime` was observed."""
    completion_s: Annotated[Time | None, Field(alias="completionTime")] = None
    """Time of the end; `ttlSecondsAfterFinished` counts from it."""
    drain_s: Annotated[Time | None, Field(alias="drainTime")] = None
    """Time since which the operator waits for the learner to end."""
    updated_s: Annotated[Time | None, Field(alias="updateTime")] = None
    """Time of this write. If only numbers changed, the status is written every 30 s at most."""
    lag_limit_steps: Annotated[Count | None, Field(alias="admissionLagSteps")] = None
    """Lag limit in force, in policy versions."""
    last_decision: LastDecision | None = None
    learner: LearnerStatus = LearnerStatus()
    groups: Annotated[
        tuple[GroupStatus, ...],
        Field(alias="rollouts", max_length=8, json_schema_extra=_list("name")),
    ] = ()
    """Groups of rollout workers."""
    control: dict[str, Any] = {}
    """State of the control loop, for a restarted operator. Not an API."""

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Read a status; missing fields keep their defaults.

        Raises: ValueError when this operator cannot have written it.
        """
        return cls.model_validate(entry)

    def to_dict(self) -> dict[str, Any]:
        return _filled(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    def condition(self, kind: str) -> StatusCondition | None:
        return next((each for each in self.conditions if each.type == kind), None)

    def holds(self, kind: str) -> bool:
        condition = self.condition(kind)
        return condition is not None and condition.status == "True"

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own idiom
    @property
    def reason(self) -> Word | None:
        """Why the run trains or not, one word: the cause behind Ready."""
        ready = self.condition("Ready")
        if ready is None or ready.reason not in _SUMMARIES:
            return None if ready is None else ready.reason
        names = ("LearnerReady", "RolloutsReady", "SignalsFresh")
        parts = (self.condition(kind) for kind in names)
        causes = (part.reason for part in parts if part is not None and part.status == "False")
        return next((cause for cause in causes if cause not in _NO_CAUSES), ready.reason)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def workers(self) -> Pair:
        """Rollout workers, ready/desired."""
        ready = sum(group.ready for group in self.groups)
        desired = sum(group.desired for group in self.groups)
        return f"{ready}/{desired}" if self.groups else ""


def _filled(document: dict[str, Any]) -> dict[str, Any]:
    parts = {
        name: _filled(value) if isinstance(value, dict) and name != "control" else value
        for name, value in document.items()
    }
    return {name: value for name, value in parts.items() if value not in ("", [], {})}


def status_schema() -> dict[str, Any]:
    """Return the JSON schema of a status, without defaults; nothing is required at its top."""
    schema = RunStatus.model_json_schema(by_alias=True, mode="serialization")
    del schema["required"]
    for part in (schema, *schema["$defs"].values()):
        for field in part.get("properties", {}).values():
            field.pop("default", None)
    return schema
