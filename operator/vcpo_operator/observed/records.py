"""Records of what is in the cluster: slim, typed, made once from what the API server sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vcpo_operator.children.manifest import Kind
from vcpo_operator.names import Role, RunKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A VCPORun as it is stored."""

    key: RunKey
    uid: str
    generation: int
    resource_version: int
    deleting: bool
    spec: Mapping[str, Any]
    """As stored; checked by `vcpo.spec` before anybody believes it."""
    status: Mapping[str, Any]
    """As stored; read by `RunStatus.from_dict`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a pod does not work or is not there, as Kubernetes says it."""

    reason: str
    """A word of Kubernetes: `ImagePullBackOff`, `Unschedulable`, `OOMKilled`, ..."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEnd:
    """How a container of a pod ended last."""

    pod: str
    exit_code: int
    reason: str
    """A word of Kubernetes: `Error`, `OOMKilled`, `Completed`, ..."""
    message: str
    """The last lines of its log, where it failed."""
    time: str
    """RFC 3339; empty when the kubelet does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedChild:
    """Any child: identity, and what tells whether it is as it was applied."""

    kind: Kind
    name: str
    uid: str
    owner_uid: str | None
    """The controlling owner; None when there is none."""
    digest: str | None
    """Digest of the manifest applied last; None when somebody else made the object."""
    version: int
    """Rises with every change of what was applied: the generation, where the kind has one."""
    deleting: bool = False
    adoptable: bool = False
    """Whether its owner lets the run have it, by an annotation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLearner:
    """The learner's StatefulSet."""

    child: ObservedChild
    replicas: int
    settled: bool
    """Whether its controller has seen the newest spec; pods made before may be of an older one."""
    cause: Cause | None = None
    """Why its controller cannot make its pod; None when nothing is known to hinder it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedGroup:
    """A rollout group's Deployment."""

    child: ObservedChild
    group: str
    replicas: int
    """Pods asked for."""
    current: int
    """Pods there are, those on their way out not counted."""
    ready: int
    paused: bool
    cause: Cause | None = None
    """Why its controller cannot make some of its pods; None when nothing hinders it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedClaim:
    """The claim for checkpoints and models."""

    child: ObservedChild
    storage: str
    """Size asked for, as Kubernetes writes it."""
    storage_class: str | None
    """None until the cluster has given it one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedScaler:
    """A rollout group's VCPORolloutScaler."""

    child: ObservedChild
    group: str
    replicas: int
    """Workers that somebody asks for."""
    reported_replicas: int | None
    """Workers that its status tells of; None while it tells nothing."""
    reported_selector: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """A pod of a run."""

    name: str
    uid: str
    role: Role
    group: str | None
    template_digest: str | None
    ready: bool
    leaving: bool
    deletion_cost: int | None
    restarts: int
    """Times its containers were started again."""
    cause: Cause | None
    """What keeps it from working; None when nothing is known to."""
    last_end: ContainerEnd | None = None
    """How its own container, not a user's, ended last; None while it has not ended yet."""
    has_ended: bool = False
    """Whether it has ended for good; its controller makes another."""
    node: str | None = None
    """Where it was placed; None while it is nowhere."""
    is_gated: bool = False
    """Whether a queue such as Kueue keeps it from being placed."""
    gone_by_s: float | None = None
    """Unix time by which its kubelet should have ended it; None while it stays, and when somebody
    else's finalizer holds it."""
    is_starting: bool = False
    """Whether it has a node, where no container of it has started yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedState:
    """Everything that belongs to one run at one moment."""

    children: tuple[ObservedChild, ...] = ()
    """Every child, workloads included."""
    learner: ObservedLearner | None = None
    claims: Mapping[str, ObservedClaim] = field(default_factory=dict)
    """By name."""
    groups: Mapping[str, ObservedGroup] = field(default_factory=dict)
    """Deployments by rollout group, those of groups that left the spec included."""
    scalers: Mapping[str, ObservedScaler] = field(default_factory=dict)
    """By name: beside a group's own, those of older names and of groups that left the spec."""
    pods: tuple[ObservedPod, ...] = ()

    @property
    def lacks_reference(self) -> bool:
        """Whether a container waits for a Secret or ConfigMap that is not there."""
        causes = (pod.cause for pod in self.pods)
        return any(each and each.reason == "CreateContainerConfigError" for each in causes)

    def child(self, kind: Kind, name: str) -> ObservedChild | None:
        """The child of a kind and name; None when there is none."""
        found = (each for each in self.children if (each.kind, each.name) == (kind, name))
        return next(found, None)

    def pods_of(self, role: Role, group: str | None = None) -> list[ObservedPod]:
        """Pods of a role (and group) that are not on their way out."""
        return [
            pod
            for pod in self.pods
            if pod.role is role and not pod.leaving and group in {None, pod.group}
        ]
