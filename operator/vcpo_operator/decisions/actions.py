"""Actions: everything the operator may do to the world, as values. `apply` carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from vcpo_operator.children.manifest import Child, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Server-side apply of a child."""

    child: Child
    force: bool
    """Take fields over from other managers; False for what was never seen to be ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueToken:
    """Make the Secret of a run's token, and the token."""

    child: Child


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedScaler:
    """Make a group's scaler with its first number, which is whoever scales' from then on."""

    child: Child
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Set the replicas of a rollout Deployment through its scale subresource."""

    name: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportScale:
    """Tell an autoscaler, by its scaler's status, how many workers there are and which."""

    name: str
    uid: str
    replicas: int
    selector: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDeletionCost:
    """Say how much is lost with a pod, before some pod has to go."""

    pod: str
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteChild:
    """Delete a child that is no longer wanted, and what it owns."""

    kind: Kind
    name: str
    uid: str
    """Only the object with this uid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Delete a pod, so that its controller makes one from the current template."""

    name: str
    uid: str
    """Only the pod with this uid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Tell the learner the lag bound for new work."""

    admission_lag_steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Tell the learner to hand out no more work, take what is under way, save and end."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeases:
    """Hand back the leases of a worker whose pod is gone."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRun:
    """Delete the run itself: its time to live is over."""

    uid: str


Action = (
    Apply
    | IssueToken
    | SeedScaler
    | Scale
    | ReportScale
    | SetDeletionCost
    | DeleteChild
    | DeletePod
    | Throttle
    | Drain
    | ReleaseLeases
    | DeleteRun
)


def target_name(action: Action) -> str:
    """Kind and name of the child that an action is about; empty when it is about none."""
    match action:
        case Apply(child=child) | IssueToken(child=child) | SeedScaler(child=child):
            return f"{child.kind.kind} {child.name}"
        case Scale(name=name):
            return f"{Kind.DEPLOYMENT.kind} {name}"
        case _:
            return ""
