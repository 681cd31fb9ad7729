"""Objects of an API server, parsed into records."""

from __future__ import annotations

from typing import Any

from vcpo_operator.children import Kind
from vcpo_operator.names import RunKey
from vcpo_operator.observed.index_view import index_child, run_key
from vcpo_operator.observed.parse import (
    collect_observed,
    parse_child,
    parse_group,
    parse_learner,
    parse_pod,
    parse_run_record,
)


def body(**parts: Any) -> dict[str, Any]:
    metadata = {
        "name": "demo-rollout-main",
        "namespace": "ml",
        "uid": "u",
        "resourceVersion": "7",
        "labels": {"vcpo.dev/run": "demo", "vcpo.dev/role": "rollout", "vcpo.dev/group": "main"},
        **parts.pop("metadata", {}),
    }
    return {"metadata": metadata, "spec": {}, **parts}


def test_the_controlling_owner_is_the_owner():
    owners = [{"uid": "friend"}, {"uid": "boss", "controller": True}]
    assert parse_child(Kind.SERVICE, body(metadata={"ownerReferences": owners})).owner_uid == (
        "boss"
    )


def test_the_version_is_the_generation_where_there_is_one():
    assert parse_child(Kind.SERVICE, body()).version == 7
    assert parse_child(Kind.DEPLOYMENT, body(metadata={"generation": 3})).version == 3


def test_a_deployment_that_says_nothing_of_replicas_has_one():
    group = parse_group(body())
    assert (group.group, group.replicas, group.ready) == ("main", 1, 0)


def test_a_statefulset_settles_when_its_controller_has_seen_it():
    new = {"metadata": {"generation": 2}, "status": {"observedGeneration": 1}}
    assert not parse_learner(body(**new)).is_up_to_date
    assert parse_learner(body(**{**new, "status": {"observedGeneration": 2}})).is_up_to_date


def test_a_pod_is_ready_by_its_condition():
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    found = parse_pod(body(status=ready))
    assert found is not None
    assert (found.ready, found.terminating, found.group) == (True, False, "main")


def test_a_pod_with_a_date_of_deletion_is_leaving():
    found = parse_pod(body(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}))
    assert found is not None
    assert found.terminating


def test_restarts_of_all_containers_count():
    statuses = [{"name": "a", "restartCount": 2}, {"name": "b", "restartCount": 1}]
    found = parse_pod(body(status={"containerStatuses": statuses}))
    assert found is not None
    assert found.restarts == 3


def test_a_cost_that_is_no_number_is_none():
    annotations = {"controller.kubernetes.io/pod-deletion-cost": "high"}
    found = parse_pod(body(metadata={"annotations": annotations}))
    assert found is not None
    assert found.deletion_cost is None


def test_a_pod_of_an_unknown_role_is_not_ours():
    assert parse_pod(body(metadata={"labels": {"vcpo.dev/role": "judge"}})) is None


def test_the_order_of_arrival_does_not_matter():
    first = parse_child(Kind.SERVICE, body(metadata={"name": "a"}))
    second = parse_child(Kind.SERVICE, body(metadata={"name": "b"}))
    nothing = ([], [], [], [], [])
    assert collect_observed(*nothing, [first, second]) == collect_observed(
        *nothing, [second, first]
    )


def test_a_run_keeps_spec_and_status_as_they_are_stored():
    record = parse_run_record(body(spec={"steps": 3}, status={"step": 1}))
    assert (record.key, record.spec, record.status) == (
        RunKey("ml", "demo-rollout-main"),
        {"steps": 3},
        {"step": 1},
    )


def test_a_child_without_our_label_belongs_to_no_run():
    stranger = body(metadata={"labels": {}})
    assert run_key(stranger) is None
    assert index_child(Kind.SERVICE, stranger) == {}
