"""Obstacles: what stands in the way of a child. Pure.

An object of the child's name may be there already and be somebody else's: it is never taken over,
unless its owner says so in an annotation. Or it is the claim that an earlier run left behind, which
can neither shrink nor change its storage class (docs/design/044-whose-objects.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from vcpo.spec.workloads import Learner
from vcpo_operator.children.manifest import Child, Kind, with_digest
from vcpo_operator.names import ADOPT_ANNOTATION, TOKEN_KEY
from vcpo_operator.observed.records import ObservedChild, ObservedClaim

_UNITS: Final = {
    **{
        unit: 1024 ** (power + 1) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))
    },
    **{unit: 1000 ** (power + 1) for power, unit in enumerate(("k", "M", "G", "T", "P", "E"))},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Why the run does not get on, as a condition says it."""

    reason: str
    message: str


def is_ours(there: ObservedChild, owner_uid: str | None) -> bool:
    """Whether the operator may change an object for the run with this uid.

    A claim that we made and that has no owner is what an earlier run of the name left behind.
    """
    if there.owner_uid is not None:
        return there.owner_uid == owner_uid
    if there.kind is Kind.SECRET:
        return False
    return there.adoptable or (there.kind is Kind.CLAIM and there.digest is not None)


def name_conflict(there: ObservedChild, owner_uid: str | None) -> Conflict | None:
    """Somebody else's object of a child's name; None when the operator may have it."""
    if is_ours(there, owner_uid):
        return None
    what = f"{there.kind.kind} {there.name}"
    if there.owner_uid is not None:
        message = f"{what} belongs to another owner; waiting for it to go"
    elif there.kind is Kind.SECRET:
        message = (
            f"{what} is there already and is not this run's. Delete or rename it; or name it in"
            f" `pods.tokenSecretName`, if it holds the run's token under the key `{TOKEN_KEY}`"
        )
    else:
        message = (
            f"{what} is there already and is not this run's. Delete or rename it; or give it to the"
            f" run, which changes it and takes it along when deleted: kubectl annotate"
            f" {there.kind.kind.lower()} {there.name} {ADOPT_ANNOTATION}=true"
        )
    return Conflict(reason="NameTaken", message=message)


def storage_class_conflict(child: Child, there: ObservedClaim) -> Conflict | None:
    """A storage class other than the one that the run asks for; None when the claim will do."""
    wanted = child.manifest["spec"].get("storageClassName")
    if wanted is None or wanted == there.storage_class:
        return None
    message = (
        f"PersistentVolumeClaim {child.name} is there already with the storage class"
        f" '{there.storage_class or ''}', which cannot change;"
        f" `learner.checkpointStorageClassName` asks for '{wanted}'. Make the run anew with that"
        f" class; or {_deletion(child.name)}"
    )
    return Conflict(reason="ClaimMismatch", message=message)


def keep_claim_size(child: Child, there: ObservedClaim) -> Child:
    """The claim as it can be applied: with its present size where that is more than asked for."""
    if storage_bytes(there.storage) <= storage_bytes(_asked(child)):
        return child
    spec = {**child.manifest["spec"], "resources": {"requests": {"storage": there.storage}}}
    return Child(kind=child.kind, manifest=with_digest({**child.manifest, "spec": spec}))


def oversized_claims_note(learner: Learner, claims: Iterable[ObservedClaim]) -> str:
    """A sentence for each claim of ours that is larger than asked for."""
    asked = f"{learner.checkpoint_storage_gibibytes}Gi"
    larger = (each for each in claims if storage_bytes(each.storage) > storage_bytes(asked))
    return " ".join(
        f"PersistentVolumeClaim {each.child.name} has {each.storage} and is used as it is:"
        f" `learner.checkpointStorageGibibytes` asks for {asked}, and a claim cannot shrink."
        for each in larger
        if each.child.digest is not None
    )


def claim_growth_refusal(name: str, refusal: str) -> str:
    """The API server's refusal to make a claim what the run asks for, with the cure."""
    return (
        f"{refusal.rstrip('.')}. Set `learner.checkpointStorageGibibytes` back to what it has; or"
        f" suspend the run, {_deletion(name)}"
    )


def unreadable_token_conflict(refusal: str) -> Conflict:
    """The Secret with the run's token may not be read."""
    message = f"{refusal.rstrip('.')}. Give the operator's role `get` and `create` of secrets"
    return Conflict(reason="ApplyFailed", message=message)


def storage_bytes(quantity: str) -> Decimal:
    """Bytes of a size as Kubernetes writes it: `50Gi`, `1T`, `1000000`.

    Raises: decimal.InvalidOperation for anything else.
    """
    unit = next((each for each in _UNITS if quantity.endswith(each)), "")
    return Decimal(quantity.removesuffix(unit)) * Decimal(_UNITS.get(unit, 1))


def _asked(child: Child) -> str:
    return str(child.manifest["spec"]["resources"]["requests"]["storage"])


def _deletion(claim: str) -> str:
    return (
        "delete the claim, and with it the checkpoints and models that it holds:"
        f" kubectl delete pvc {claim}"
    )
