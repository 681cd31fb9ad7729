"""Records of the objects in the cluster, with the few fields that the operator needs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vcpo_operator.children.manifest import Kind
from vcpo_operator.children.revision import Revision
from vcpo_operator.names import Role, RunKey
from vcpo_operator.observed.status import ContainerEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A VCPORun as it is stored."""

    key: RunKey
    uid: str
    generation: int
    resource_version: int
    deleting: bool
    spec: Mapping[str, Any]
    status: Mapping[str, Any]
    created: str = ""
    """Time of its creation, RFC 3339; empty if the API server did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a pod does not work or does not exist, in the words of Kubernetes."""

    reason: str
    """A reason of Kubernetes: `ImagePullBackOff`, `Unschedulable`, `OOMKilled`, ..."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedChild:
    """A child of any kind: its identity, and whether it is as it was applied."""

    kind: Kind
    name: str
    uid: str
    owner_uid: str | None
    """Uid of the controlling owner; None when there is none."""
    digest: str | None
    """Digest of the manifest applied last; None when somebody else created the object."""
    version: int
    """Generation, or resource version for kinds without one; rises with every change."""
    labels: Mapping[str, str] = field(default_factory=dict)
    deleting: bool = False
    adoptable: bool = False
    """Whether an annotation allows the run to take it over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLearner:
    """The learner's StatefulSet."""

    child: ObservedChild
    replicas: int
    is_up_to_date: bool
    """Whether its controller has observed the newest spec; older pods may be of an older one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedGroup:
    """A rollout group's Deployment."""

    child: ObservedChild
    group: str
    replicas: int
    ready: int
    cause: Cause | None = None
    """Why its controller cannot create some of its pods; None when it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedClaim:
    """The claim for checkpoints and models."""

    child: ObservedChild
    storage: str
    is_bound: bool = True
    """Whether it has a volume; one that waits for it cannot change its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedConfig:
    """The ConfigMap with the run file."""

    child: ObservedChild
    revision: Revision | None
    """What the pods are made of; None if this version cannot read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """A pod of a run."""

    name: str
    uid: str
    role: Role
    group: str | None
    template_digest: str | None
    ready: bool
    terminating: bool
    deletion_cost: int | None
    restarts: int
    cause: Cause | None
    """The reason why it does not work; None when no reason is known."""
    last_end: ContainerEnd | None = None
    """How the container of its role, not a user's, ended last; None while it has not ended."""
    index: int = 0
    """Number in its StatefulSet; 0 for the pods of Deployments."""
    is_finished: bool = False
    """Whether its phase is Failed or Succeeded; its controller creates another."""
    node: str | None = None
    is_gated: bool = False
    """Whether a queue such as Kueue keeps it from being scheduled."""
    created_s: float = -math.inf
    termination_deadline_s: float | None = None
    """Unix time by which its kubelet should have ended it; None while it does not terminate, and
    when a finalizer holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedState:
    """All objects of one run at one moment."""

    children: tuple[ObservedChild, ...] = ()
    learner: ObservedLearner | None = None
    revision: Revision | None = None
    """What its pods are made of; None if this version cannot read it."""
    claims: Mapping[str, ObservedClaim] = field(default_factory=dict)
    groups: Mapping[str, ObservedGroup] = field(default_factory=dict)
    """Deployments by rollout group, also of groups that left the spec."""
    pods: tuple[ObservedPod, ...] = ()
    certificates_due: bool = False
    """Whether the run's own certificates end soon, or cannot be read."""
    certificate_end_s: float | None = None
    """Unix time at which the first certificate of the pods ends; None if none can be read."""

    @property
    def lacks_reference(self) -> bool:
        causes = (pod.cause for pod in self.pods)
        return any(each and each.reason == "CreateContainerConfigError" for each in causes)

    def child(self, kind: Kind, name: str) -> ObservedChild | None:
        found = (each for each in self.children if (each.kind, each.name) == (kind, name))
        return next(found, None)

    def pods_of(self, role: Role, group: str | None = None) -> list[ObservedPod]:
        return [
            pod
            for pod in self.pods
            if pod.role is role and not pod.terminating and group in {None, pod.group}
        ]
