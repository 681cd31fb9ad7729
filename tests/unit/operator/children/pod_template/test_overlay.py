from __future__ import annotations

import pytest

from vcpo_operator.children.pod_template.overlay import merge_template

BASE = {
    "spec": {
        "containers": [{"name": "main", "image": "ours", "env": [{"name": "A", "value": "1"}]}],
        "volumes": [{"name": "config"}],
        "nodeSelector": {"os": "linux"},
    }
}


def spec_of(**patch: object) -> dict[str, object]:
    return merge_template(BASE, {"spec": patch})["spec"]


def test_maps_merge():
    assert spec_of(nodeSelector={"gpu": "yes"})["nodeSelector"] == {"os": "linux", "gpu": "yes"}


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


def test_neither_side_is_changed():
    spec_of(containers=[{"name": "main", "image": "theirs"}])
    assert BASE["spec"]["containers"][0]["image"] == "ours"


def test_an_item_without_its_key_is_refused_by_name():
    with pytest.raises(ValueError, match=r"each item of `spec.volumes` must have `name`"):
        spec_of(volumes=[{"emptyDir": {}}])


@pytest.mark.parametrize(
    ("patch", "complaint"),
    [
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
