"""Conflicts: an existing object that keeps a child from being applied. Pure.

An object with the child's name may belong to somebody else. The operator never takes it over,
unless its owner allows that by an annotation (docs/inside/operator-and-workers.md).
"""

from dataclasses import dataclass

from vcpo.wire.access.roles import RUN_ROLES
from vcpo_operator.children.manifest import Child, Kind, with_digest
from vcpo_operator.names import ADOPT_ANNOTATION
from vcpo_operator.observed.records import ObservedChild, ObservedClaim


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Why a run cannot make progress, in the words of its condition `Ready`."""

    reason: str
    message: str


def is_ours(existing: ObservedChild, owner_uid: str | None) -> bool:
    """Whether the operator may change an object for the run with this uid.

    A claim that the operator created and that has no owner was left by an earlier run of this name.
    """
    if existing.owner_uid is not None:
        return existing.owner_uid == owner_uid
    if existing.kind is Kind.SECRET:
        return False
    return existing.adoptable or (existing.kind is Kind.CLAIM and existing.digest is not None)


def name_conflict(existing: ObservedChild, owner_uid: str | None) -> Conflict | None:
    """Return the conflict with somebody else's object of a child's name, if there is one."""
    if is_ours(existing, owner_uid):
        return None
    what = f"{existing.kind.kind} {existing.name}"
    if existing.owner_uid is not None:
        message = f"{what} belongs to another owner; the operator waits until it is deleted"
    elif existing.kind is Kind.SECRET:
        message = (
            f"{what} exists already and is not this run's. Delete or rename it. If it holds the"
            f" run's keys `{'`, `'.join(RUN_ROLES)}`, name it in `pods.keysSecretName` instead; if"
            " it holds certificates, in `pods.tlsSecretName`"
        )
    else:
        message = (
            f"{what} exists already and is not this run's. Delete or rename it; or give it to the"
            " run, which then changes it, and deletes it when the run is deleted: kubectl annotate"
            f" {existing.kind.kind.lower()} {existing.name} {ADOPT_ANNOTATION}=true"
        )
    return Conflict(reason="NameTaken", message=message)


def keep_size(child: Child, existing: ObservedClaim, *, may_grow: bool) -> Child:
    """Return the claim with the size that it has, unless it is to grow: it cannot shrink.

    may_grow: Whether the run says its size. If not, its storage class may not let it grow, and the
        user asked for nothing. A claim that waits for its volume cannot grow either.
    """
    spec = child.manifest["spec"]
    wanted, has = spec["resources"]["requests"]["storage"], existing.storage
    is_growth = has.endswith("Gi") and float(has[:-2]) < float(wanted[:-2])
    if has == wanted or (is_growth and may_grow and existing.is_bound):
        return child
    kept = {**spec, "resources": {"requests": {"storage": has}}}
    return Child(kind=child.kind, manifest=with_digest({**child.manifest, "spec": kept}))


def unreadable_keys_conflict(refusal: str) -> Conflict:
    """Return the conflict of an operator that may not read the Secret with the run's keys."""
    message = (
        f"{refusal.rstrip('.')}. Give the operator's role `get`, `create` and `update` of secrets"
    )
    return Conflict(reason="ApplyFailed", message=message)


def unusable_key_conflict(problem: str) -> Conflict:
    """Return the conflict of a Secret with a key that cannot be used."""
    message = f"{problem}. Then delete the run's pods: they keep the keys with which they started"
    return Conflict(reason="KeyUnusable", message=message)
