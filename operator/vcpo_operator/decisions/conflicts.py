"""Conflicts: an existing object that keeps a child from being applied. Pure.

An object with the child's name may belong to somebody else. The operator never takes it over,
unless its owner allows that by an annotation. Or the object is the claim of an earlier run. A claim
can neither shrink nor change its storage class or its access mode
(docs/design/044-objects-of-a-run.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from vcpo.api import VCPORunSpec
from vcpo.wire.access.roles import RUN_ROLES
from vcpo_operator.children.manifest import Child, Kind, with_digest
from vcpo_operator.names import ADOPT_ANNOTATION, ROLE_LABEL, Role
from vcpo_operator.observed.records import ObservedChild, ObservedClaim

_UNITS: Final = {
    **{
        unit: 1024 ** (power + 1) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))
    },
    **{unit: 1000 ** (power + 1) for power, unit in enumerate(("k", "M", "G", "T", "P", "E"))},
}


_SHARED: Final = "ReadWriteMany"
"""Access mode of a volume that pods on several nodes write."""


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


def storage_class_conflict(child: Child, existing: ObservedClaim) -> Conflict | None:
    """Return the conflict with a claim of another storage class; None when the claim fits."""
    wanted = child.manifest["spec"].get("storageClassName")
    if wanted is None or wanted == existing.storage_class:
        return None
    message = (
        f"PersistentVolumeClaim {child.name} exists already with the storage class"
        f" '{existing.storage_class or ''}', which cannot change;"
        f" `learner.checkpointStorageClassName` asks for '{wanted}'. Create the run again with that"
        f" class; or {_deletion(child.name)}"
    )
    return Conflict(reason="ClaimMismatch", message=message)


def access_mode_conflict(child: Child, existing: ObservedClaim) -> Conflict | None:
    """Return the conflict with a claim that fewer pods can write than train together, if it is."""
    if not existing.access_modes or _SHARED in existing.access_modes:
        return None
    if _SHARED not in child.manifest["spec"]["accessModes"]:
        return None
    message = (
        f"PersistentVolumeClaim {child.name} exists already with the access mode"
        f" '{existing.access_modes[0]}', which cannot change; the pods of `learner.replicas` need"
        f" '{_SHARED}'. Set `learner.replicas` to 1; or {_deletion(child.name)}"
    )
    return Conflict(reason="ClaimMismatch", message=message)


def keep_claim(child: Child, existing: ObservedClaim, *, is_size_set: bool) -> Child:
    """Return the claim with what it has and cannot lose: a larger size, a wider access mode.

    is_size_set: whether the run says its size. If not, the claim keeps the one that it has: its
        storage class may not let it grow, and the user asked for nothing. A claim that waits for
        its volume keeps it too; the API server refuses to change it.
    """
    spec = dict(child.manifest["spec"])
    requested = str(spec["resources"]["requests"]["storage"])
    is_larger = storage_bytes(existing.storage) > storage_bytes(requested)
    if not is_size_set or not existing.is_bound or is_larger:
        spec["resources"] = {"requests": {"storage": existing.storage}}
    if _SHARED in existing.access_modes:
        spec["accessModes"] = list(existing.access_modes)
    if spec == child.manifest["spec"]:
        return child
    return Child(kind=child.kind, manifest=with_digest({**child.manifest, "spec": spec}))


def oversized_claims_note(spec: VCPORunSpec, claims: Iterable[ObservedClaim]) -> str:
    """Return a sentence for each of the run's claims that is larger than requested."""
    requested = f"{spec.checkpoint_storage_gibibytes}Gi"
    larger = (each for each in claims if storage_bytes(each.storage) > storage_bytes(requested))
    return " ".join(
        f"PersistentVolumeClaim {each.child.name} has {each.storage} and is used as it is:"
        f" `learner.checkpointStorageGibibytes` asks for {requested}, and a claim cannot shrink."
        for each in larger
        if each.child.digest is not None and each.child.labels.get(ROLE_LABEL) != Role.MODEL
    )


def claim_growth_refusal(name: str, refusal: str) -> str:
    """Return the API server's refusal to grow a claim, with the cure."""
    return (
        f"{refusal.rstrip('.')}. Set `learner.checkpointStorageGibibytes` back to its old value; or"
        f" suspend the run, {_deletion(name)}"
    )


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


def storage_bytes(quantity: str) -> Decimal:
    """Return the bytes of a size as Kubernetes writes it: `50Gi`, `1T`, `1000000`.

    Raises: decimal.InvalidOperation for anything else.
    """
    unit = next((each for each in _UNITS if quantity.endswith(each)), "")
    return Decimal(quantity.removesuffix(unit)) * Decimal(_UNITS.get(unit, 1))


def _deletion(claim: str) -> str:
    return (
        "delete the claim, and with it the checkpoints and models that it holds:"
        f" kubectl delete pvc {claim}"
    )
