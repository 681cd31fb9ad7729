"""Actions: every change that the operator can make, as values. Pure."""

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
class IssueSecret:
    """Create the Secret of a run's keys or certificates, or renew its certificates."""

    child: Child
    renews: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDeletionCost:
    """Annotate a pod with the trajectories that its deletion would lose."""

    pod: str
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete an object and what it owns; a pod's controller creates another one."""

    kind: Kind
    name: str
    uid: str
    """Only the object with this uid is deleted."""
    grace_s: int | None = None
    """Time that a pod has to end in order; None is its own."""


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


Action = Apply | IssueSecret | SetDeletionCost | Delete | Throttle | Drain | ReleaseLeases
