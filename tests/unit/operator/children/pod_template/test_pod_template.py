"""Resources of a container: defaults fill only what the user leaves unset."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from tests.fixtures.operator.runs import DEFAULTS, parent
from vcpo_operator.children import Kind, build_children
from vcpo_operator.children.family import memory_notes
from vcpo_operator.children.pod_template.overlay import merge_template
from vcpo_operator.children.pod_template.resources import with_defaults

BASE = {
    "spec": {
        "containers": [{"name": "main", "image": "ours", "env": [{"name": "A", "value": "1"}]}],
        "volumes": [{"name": "config"}],
        "nodeSelector": {"os": "linux"},
    }
}


def spec_of(**patch: object) -> dict[str, object]:
    return merge_template(BASE, {"spec": patch})["spec"]


def test_containers_merge_by_name():
    (container,) = spec_of(containers=[{"name": "main", "resources": {}}])["containers"]
    assert container["image"] == "ours"
    assert container["resources"] == {}


def test_a_container_of_another_name_is_added():
    added = spec_of(containers=[{"name": "sidecar"}])["containers"]
    assert [each["name"] for each in added] == ["main", "sidecar"]


def test_lists_within_lists_merge_too():
    patch = [{"name": "main", "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]}]
    (container,) = spec_of(containers=patch)["containers"]
    assert container["env"] == [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]


def test_null_removes():
    assert "nodeSelector" not in spec_of(nodeSelector=None)


def test_other_lists_are_replaced():
    base = {"tolerations": [{"key": "a"}]}
    assert merge_template(base, {"tolerations": [{"key": "b"}]}) == {"tolerations": [{"key": "b"}]}


def test_an_item_without_its_key_is_refused_by_name():
    with pytest.raises(ValueError, match=r"each item of `spec.volumes` must have `name`"):
        spec_of(volumes=[{"emptyDir": {}}])


def test_constraints_and_ports_that_differ_in_half_of_their_key_stay_two():
    spread = [
        {"topologyKey": "host", "whenUnsatisfiable": each}
        for each in ("DoNotSchedule", "ScheduleAnyway")
    ]
    ports = [{"containerPort": 9, "protocol": "UDP"}, {"containerPort": 9}]
    containers = [{"name": "main", "ports": ports}]
    made = spec_of(topologySpreadConstraints=spread, containers=containers)
    assert made["topologySpreadConstraints"] == spread
    assert made["containers"][0]["ports"] == ports
    own = {"ports": [{"containerPort": 9, "name": "ours"}]}
    merged = merge_template(
        own, {"ports": [{"containerPort": 9, "protocol": "TCP", "hostPort": 1}]}
    )
    assert [each["name"] for each in merged["ports"]] == ["ours"]


@pytest.mark.parametrize(
    ("patch", "complaint"),
    [
        ({"volumes": [{"name": "a"}, {"name": "a"}]}, r"`spec.volumes\[a\]` stands there twice"),
        ({"containers": {"name": "main"}}, "`spec.containers` must be a list"),
        ({"containers": None}, "`spec.containers` cannot be removed"),
        ({"containers": [{"name": ["main"]}]}, "each item of `spec.containers` must have `name`"),
        ({"containers": [{"name": "main", "env": "A=1"}]}, r"`spec.containers\[main\].env` must"),
        ({"nodeSelector": "gpu"}, "`spec.nodeSelector` must be a map, got 'gpu'"),
    ],
)
def test_a_value_of_another_shape_than_ours_is_refused_by_its_path(
    patch: dict[str, object], complaint: str
):
    with pytest.raises(ValueError, match=complaint):
        spec_of(**patch)


def test_a_label_with_the_name_of_a_list_is_a_label():
    labels = {"metadata": {"labels": {"env": "prod", "ports": "open"}}}
    assert merge_template({"metadata": {"labels": {}}}, labels) == labels


REQUESTS, LIMITS = {"cpu": "500m", "memory": "2Gi"}, {"memory": "32Gi"}
QUANTITIES = {
    "cpu": st.sampled_from(["100m", "1", "64"]),
    "memory": st.sampled_from(["512Mi", "2Gi", "300Gi"]),
    "nvidia.com/gpu": st.sampled_from([1, 8]),
}


@pytest.mark.parametrize(
    ("said", "made"),
    [
        ({}, {"requests": REQUESTS, "limits": LIMITS}),
        (
            {"limits": {"nvidia.com/gpu": 1}},
            {"requests": REQUESTS, "limits": {"nvidia.com/gpu": 1}},
        ),
        (
            {"requests": {"amd.com/gpu": 1}, "limits": {"amd.com/gpu": 1, "cpu": "8"}},
            {
                "requests": {"memory": "2Gi", "amd.com/gpu": 1},
                "limits": {"amd.com/gpu": 1, "cpu": "8"},
            },
        ),
        ({"requests": {"memory": "64Gi"}}, {"requests": {"cpu": "500m", "memory": "64Gi"}}),
        ({"limits": {"memory": "1Gi"}}, {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi"}}),
        ({"claims": [{"name": "gpu"}]}, {"claims": [{"name": "gpu"}], "requests": REQUESTS}),
    ],
)
def test_defaults_stand_where_nothing_is_said(said: dict[str, Any], made: dict[str, Any]):
    assert with_defaults(said) == made


@given(
    said=st.fixed_dictionaries(
        {},
        optional={
            part: st.fixed_dictionaries({}, optional=QUANTITIES) for part in ("requests", "limits")
        },
    ).filter(
        lambda said: all(
            parse_quantity(value) <= parse_quantity(said["limits"].get(name, value))
            for name, value in said.get("requests", {}).items()
            if "limits" in said
        )
    )
)
def test_what_the_user_says_stays_and_no_request_is_above_its_limit(said: dict[str, Any]):
    made = with_defaults(said)
    for part, values in said.items():
        assert values.items() <= made.get(part, {}).items()
    limits = made.get("limits", {})
    for name, value in made.get("requests", {}).items():
        assert parse_quantity(value) <= parse_quantity(limits.get(name, value))


def test_without_gpus_request_and_limit_hold_what_the_model_needs_and_its_shared_memory():
    learner = {"processes": 4}
    for billions, limit in ((0.1, 32), (7.6, None)):
        made = build_children(
            parent(model={"name": "m", "sizeBillions": billions}, learner=learner), DEFAULTS
        )
        (child,) = (each for each in made if each.kind is Kind.STATEFUL_SET)
        pod = child.manifest["spec"]["template"]["spec"]
        asked = pod["containers"][0]["resources"]
        needed = int(asked["requests"]["memory"].removesuffix("Gi"))
        assert needed >= 20 + 12 * billions
        assert asked["limits"] == {"memory": f"{limit or needed}Gi"}
        (shared,) = (each for each in pod["volumes"] if each["name"] == "shared-memory")
        assert int(shared["emptyDir"]["sizeLimit"].removesuffix("Gi")) < (limit or needed)


@pytest.mark.parametrize(
    ("limit", "is_told"),
    [
        *(("8Gi", True), ("9G", True), ("9e9", True), ("8589934592000m", True)),
        *(("32Gi", False), ("1Ti", False), ("64000M", False), (None, False)),
    ],
)
def test_a_memory_limit_below_what_the_model_needs_is_told(limit, is_told):
    resources = {} if limit is None else {"resources": {"limits": {"memory": limit}}}
    template = {"spec": {"containers": [{"name": "learner", **resources}]}}
    run = parent(model={"name": "m", "sizeBillions": 0.5}, learner={"template": template})
    told = list(memory_notes(run, build_children(run, DEFAULTS)))
    expected = f"The memory limit {limit} of demo-learner is below the 15Gi that a model of"
    assert [each.startswith(expected) for each in told] == [True] * is_told


def test_a_container_that_the_user_adds_is_left_as_it_is():
    sidecar = {"spec": {"containers": [{"name": "sidecar", "image": "s"}]}}
    made = build_children(parent(learner={"template": sidecar}), DEFAULTS)
    (learner,) = (each for each in made if each.kind is Kind.STATEFUL_SET)
    containers = learner.manifest["spec"]["template"]["spec"]["containers"]
    assert {each["name"]: "resources" in each for each in containers} == {
        "learner": True,
        "sidecar": False,
    }
