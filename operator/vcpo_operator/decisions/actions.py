"""Actions: every change that the operator can make, as values. Pure.

`cluster_api.executor` executes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from vcpo_operator.children.manifest import Child, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Apply a child (server-side apply)."""

    child: Child
    force: bool
    """Take fields over from other managers; False for an object not yet known to be the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueKeys:
    """Create the Secret of a run's keys, with new keys."""

    child: Child


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueCertificates:
    """Create the Secret of a run's certificates, or renew the certificates in it."""

    child: Child
    renews: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Set the replicas of a rollout Deployment through its scale subresource."""

    name: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Set a rollout Deployment to zero, and note on it how many workers it comes back with."""

    name: str
    noted_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Set the replicas of a suspended rollout Deployment, and remove the note."""

    name: str
    replicas: int
    resource_version: str
    """Only a Deployment of this version is changed: a later one may be an autoscaler's already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDeletionCost:
    """Annotate a pod with the trajectories that its deletion would lose."""

    pod: str
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteChild:
    """Delete a child that the run no longer wants, and what the child owns."""

    kind: Kind
    name: str
    uid: str
    """Only the object with this uid is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Delete a pod; its controller creates one from the current template."""

    name: str
    uid: str
    """Only the pod with this uid is deleted."""
    grace_s: int | None = None
    """Time to end in order; None is the pod's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Set the learner's lag limit."""

    lag_limit_steps: int
    reason: str
    """A clause without a full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Tell the learner to hand out no more work, take what is in flight, save and end."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeases:
    """Release the leases of a worker whose pod is gone."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRun:
    """Delete the run itself, when its time to live has passed."""

    uid: str


Action = (
    Apply
    | IssueKeys
    | IssueCertificates
    | Scale
    | Suspend
    | Resume
    | SetDeletionCost
    | DeleteChild
    | DeletePod
    | Throttle
    | Drain
    | ReleaseLeases
    | DeleteRun
)


def target_name(action: Action) -> str:
    """Return kind and name of the child that an action changes; empty for other actions."""
    match action:
        case Apply(child=child) | IssueKeys(child=child) | IssueCertificates(child=child):
            return f"{child.kind.kind} {child.name}"
        case Scale(name=name) | Suspend(name=name) | Resume(name=name):
            return f"{Kind.DEPLOYMENT.kind} {name}"
        case _:
            return ""
