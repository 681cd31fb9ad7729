"""Objects in the way of a child, and the sentence that names one with its cure."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.fixtures.operator.runs import DEFAULTS, UID, parent
from tests.unit.operator.decisions.plans import desired_for, plan_names, settled_cluster
from vcpo_operator.children import Child, Kind, build_children
from vcpo_operator.decisions.conflicts import is_ours, keep_size, name_conflict
from vcpo_operator.decisions.plan import first_conflict
from vcpo_operator.observed.records import ObservedChild, ObservedClaim, ObservedState


def there(kind: Kind = Kind.CONFIG_MAP, name: str = "demo-config", **changes: Any) -> ObservedChild:
    seen = {"uid": "u", "owner_uid": None, "digest": None, "version": 1, **changes}
    return ObservedChild(kind=kind, name=name, **seen)


def claim(storage: str = "50Gi", **changes: Any) -> ObservedClaim:
    child = there(Kind.CLAIM, "demo-learner", **{"digest": "d", **changes})
    return ObservedClaim(child=child, storage=storage)


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


@pytest.mark.parametrize(
    ("storage", "applied"), [("100Gi", "100Gi"), ("1Ti", "1Ti"), ("50Gi", "50Gi"), ("1Gi", "50Gi")]
)
def test_a_claim_never_shrinks(storage: str, applied: str):
    made = keep_size(made_claim(), claim(storage), may_grow=True)
    assert made.manifest["spec"]["resources"]["requests"]["storage"] == applied
    assert (made.digest == made_claim().digest) is (applied == "50Gi")


@pytest.mark.parametrize("storage", ["20Gi", "50Gi", "1Ti"])
def test_a_claim_keeps_its_size_if_the_run_asks_for_none(storage: str):
    made = keep_size(made_claim(), claim(storage), may_grow=False)
    assert made.manifest["spec"]["resources"]["requests"]["storage"] == storage


@pytest.mark.parametrize(
    ("learner", "grows"), [({}, False), ({"checkpointStorageGibibytes": 60}, True)]
)
def test_a_claim_grows_only_if_the_run_asks_for_it(learner: dict[str, int], grows: bool):
    cluster = settled_cluster(desired_for(learner={"checkpointStorageGibibytes": 42}))
    child = cluster.observed.child(Kind.CLAIM, "demo-learner")
    assert child is not None
    there = ObservedClaim(child=child, storage="42Gi")
    cluster.observed = dataclasses.replace(cluster.observed, claims={child.name: there})
    planned = plan_names(desired_for(learner=learner), cluster)
    assert ("Apply PersistentVolumeClaim demo-learner" in planned) is grows
