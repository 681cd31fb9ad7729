"""Objects in the way of a child, and the sentence that names one with its cure."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from tests.fixtures.operator.runs import DEFAULTS, UID, make_run, parent
from tests.unit.operator.decisions.plans import desired_for, plan_names, settled_cluster
from vcpo_operator.children import Child, Kind, build_children
from vcpo_operator.decisions.conflicts import (
    access_mode_conflict,
    is_ours,
    keep_claim,
    name_conflict,
    oversized_claims_note,
    storage_bytes,
    storage_class_conflict,
)
from vcpo_operator.decisions.plan import first_conflict
from vcpo_operator.observed.records import ObservedChild, ObservedClaim, ObservedState


def there(kind: Kind = Kind.CONFIG_MAP, name: str = "demo-config", **changes: Any) -> ObservedChild:
    seen = {"uid": "u", "owner_uid": None, "digest": None, "version": 1, **changes}
    return ObservedChild(kind=kind, name=name, **seen)


def claim(storage: str = "50Gi", storage_class: str | None = None, **changes: Any) -> ObservedClaim:
    child = there(Kind.CLAIM, "demo-learner", **{"digest": "d", **changes})
    return ObservedClaim(child=child, storage=storage, storage_class=storage_class)


def made_claim(**learner: Any) -> Child:
    (made,) = (
        each
        for each in build_children(parent(learner=learner), DEFAULTS)
        if each.kind is Kind.CLAIM
    )
    return made


@pytest.mark.parametrize(
    ("found", "ours"),
    [
        (there(owner_uid=UID), True),
        (there(owner_uid="other"), False),
        (there(owner_uid="other", adoptable=True), False),
        (there(), False),
        (there(digest="d"), False),  # an orphan: its run was deleted and it was to stay
        (there(adoptable=True), True),
        (claim().child, True),  # what an earlier run left behind
        (claim(digest=None).child, False),
        (claim(digest=None, adoptable=True).child, True),
    ],
)
def test_what_has_our_owner_or_an_annotation_or_is_a_kept_claim_is_ours(
    found: ObservedChild, ours: bool
):
    assert is_ours(found, UID) is ours
    assert (name_conflict(found, UID) is None) is ours


def test_somebody_elses_object_is_named_with_both_ways_out():
    conflict = name_conflict(there(), UID)
    assert conflict is not None
    assert conflict.reason == "NameTaken"
    assert conflict.message == (
        "ConfigMap demo-config exists already and is not this run's. Delete or rename it; or give"
        " it to the run, which then changes it, and deletes it when the run is deleted:"
        " kubectl annotate configmap demo-config vcpo.dev/adopt=true"
    )


def test_nothing_is_created_after_a_conflict():
    state = desired_for()
    taken = ObservedState(children=(there(Kind.SERVICE, "demo-learner"),))
    from_nothing = plan_names(state, settled_cluster(state))
    assert from_nothing == []
    cluster = settled_cluster(state)
    cluster.applied.clear()
    others = [each for each in cluster.observed.children if each.kind is not Kind.SERVICE]
    cluster.observed = dataclasses.replace(cluster.observed, children=(*others, *taken.children))
    assert plan_names(state, cluster) == [
        "Apply ConfigMap demo-config",
        "Apply PersistentVolumeClaim demo-learner",
    ]
    assert first_conflict(state, cluster.observed) == name_conflict(taken.children[0], UID)


def test_a_claim_of_another_class_is_named_with_the_cure():
    made = made_claim(checkpointStorageClassName="fast.ssd")
    assert storage_class_conflict(made, claim(storage_class="fast.ssd")) is None
    conflict = storage_class_conflict(made, claim(storage_class="slow"))
    assert conflict is not None
    assert conflict.reason == "ClaimMismatch"
    assert "the storage class 'slow', which cannot change" in conflict.message
    assert "`learner.checkpointStorageClassName` asks for 'fast.ssd'" in conflict.message
    assert "Create the run again with that class" in conflict.message
    assert "kubectl delete pvc demo-learner" in conflict.message


def shared_claim(*modes: str) -> ObservedClaim:
    return dataclasses.replace(claim(), access_modes=modes)


def test_pods_that_train_together_refuse_a_claim_that_only_one_of_them_could_write():
    conflict = access_mode_conflict(made_claim(replicas=2), shared_claim("ReadWriteOnce"))
    assert conflict is not None
    assert conflict.reason == "ClaimMismatch"
    assert conflict.message == (
        "PersistentVolumeClaim demo-learner exists already with the access mode 'ReadWriteOnce',"
        " which cannot change; the pods of `learner.replicas` need 'ReadWriteMany'. Set"
        " `learner.replicas` to 1; or delete the claim, and with it the checkpoints and models that"
        " it holds: kubectl delete pvc demo-learner"
    )


@pytest.mark.parametrize(
    ("replicas", "modes"), [(1, ["ReadWriteOnce"]), (1, ["ReadWriteMany"]), (2, ["ReadWriteMany"])]
)
def test_a_claim_that_enough_pods_can_write_is_used_with_its_access_mode(
    replicas: int, modes: list[str]
):
    made = made_claim(replicas=replicas)
    assert access_mode_conflict(made, shared_claim(*modes)) is None
    assert (
        keep_claim(made, shared_claim(*modes), is_size_set=False).manifest["spec"]["accessModes"]
        == modes
    )


def test_a_run_that_asks_for_no_class_takes_the_one_there_is():
    assert storage_class_conflict(made_claim(), claim(storage_class="slow")) is None


@pytest.mark.parametrize(
    ("storage", "applied"), [("100Gi", "100Gi"), ("1Ti", "1Ti"), ("50Gi", "50Gi"), ("1G", "50Gi")]
)
def test_a_claim_never_shrinks(storage: str, applied: str):
    made = keep_claim(made_claim(), claim(storage), is_size_set=True)
    assert made.manifest["spec"]["resources"]["requests"]["storage"] == applied
    assert (made.digest == made_claim().digest) is (applied == "50Gi")


@pytest.mark.parametrize("storage", ["20Gi", "50Gi", "1Ti"])
def test_a_claim_keeps_its_size_if_the_run_asks_for_none(storage: str):
    made = keep_claim(made_claim(), claim(storage), is_size_set=False)
    assert made.manifest["spec"]["resources"]["requests"]["storage"] == storage


@pytest.mark.parametrize(
    ("learner", "grows"), [({}, False), ({"checkpointStorageGibibytes": 60}, True)]
)
def test_a_claim_grows_only_if_the_run_asks_for_it(learner: dict[str, int], grows: bool):
    cluster = settled_cluster(desired_for(learner={"checkpointStorageGibibytes": 42}))
    child = cluster.observed.child(Kind.CLAIM, "demo-learner")
    assert child is not None
    there = ObservedClaim(child=child, storage="42Gi", storage_class=None)
    cluster.observed = dataclasses.replace(cluster.observed, claims={child.name: there})
    planned = plan_names(desired_for(learner=learner), cluster)
    assert ("Apply PersistentVolumeClaim demo-learner" in planned) is grows


def test_a_larger_claim_is_mentioned_and_a_strangers_is_not():
    spec = make_run().spec
    stranger = claim("1Ti", digest=None)
    assert oversized_claims_note(spec, [claim("50Gi"), claim("20Gi"), stranger]) == ""
    assert oversized_claims_note(spec, [claim("100Gi")]) == (
        "PersistentVolumeClaim demo-learner has 100Gi and is used as it is:"
        " `learner.checkpointStorageGibibytes` asks for 50Gi, and a claim cannot shrink."
    )


@given(
    number=st.integers(1, 10**6),
    unit=st.sampled_from(["", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]),
)
def test_sizes_are_read_as_kubernetes_reads_them(number: int, unit: str):
    assert storage_bytes(f"{number}{unit}") == parse_quantity(f"{number}{unit}")
