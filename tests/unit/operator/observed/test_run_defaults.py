"""Defaults of a platform team: what a run sets wins unless it is locked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.operator.runs import make_run
from vcpo_operator.observed.run_defaults import RunDefaults, merge_spec
from vcpo_operator.render import with_defaults


def merged(own: dict[str, Any], *layers: RunDefaults) -> tuple[dict[str, Any], list[str]]:
    """The merged spec of a run, and its origins as `field origin how`."""
    spec = make_run(**own).spec.model_dump(mode="json", by_alias=True)
    result, origins = merge_spec(spec, layers)
    return result, [f"{each.field} {each.origin} {each.how}" for each in origins]


def cluster(**parts: Any) -> RunDefaults:
    return RunDefaults(origin="vcpo-system/default", **parts)


def team(**parts: Any) -> RunDefaults:
    return RunDefaults(origin="team-a/default", **parts)


def container(*variables: tuple[str, str | None]) -> dict[str, Any]:
    env = [{"name": name, "value": value} for name, value in variables]
    return {"spec": {"containers": [{"name": "learner", "env": env}]}}


def test_a_default_fills_what_the_run_leaves_out_and_says_so():
    layer = cluster(defaults={"pods": {"tokenSecretName": "hub"}, "ttlSecondsAfterFinished": 60})
    spec, origins = merged({}, layer)
    assert (spec["pods"]["tokenSecretName"], spec["ttlSecondsAfterFinished"]) == ("hub", 60)
    assert origins == [
        "pods.tokenSecretName vcpo-system/default Default",
        "ttlSecondsAfterFinished vcpo-system/default Default",
    ]


def test_what_the_run_sets_wins_over_a_default_and_not_over_a_lock():
    own = {"pods": {"tokenSecretName": "mine", "networkIsolation": "Disabled"}}
    layer = cluster(
        defaults={"pods": {"tokenSecretName": "hub"}},
        locked={"pods": {"networkIsolation": "DenyAll"}},
    )
    spec, origins = merged(own, layer)
    assert spec["pods"]["tokenSecretName"] == "mine"
    assert spec["pods"]["networkIsolation"] == "DenyAll"
    assert origins == ["pods.networkIsolation vcpo-system/default Locked"]


def test_the_nearer_default_and_the_wider_lock_win():
    near = team(
        defaults={"pods": {"tokenSecretName": "team"}, "pullDeadlineSeconds": 60},
        locked={"startupDeadlineSeconds": 100, "loadDeadlineSeconds": 300},
    )
    wide = cluster(
        defaults={"pods": {"tokenSecretName": "all"}, "pullDeadlineSeconds": 70},
        locked={"startupDeadlineSeconds": 200},
    )
    spec, origins = merged({}, wide, near)
    assert spec["pods"]["tokenSecretName"] == "team"
    assert (spec["pullDeadlineSeconds"], spec["startupDeadlineSeconds"]) == (60, 200)
    assert origins == [
        "pods.tokenSecretName team-a/default Default",
        "pullDeadlineSeconds team-a/default Default",
        "loadDeadlineSeconds team-a/default Locked",
        "startupDeadlineSeconds vcpo-system/default Locked",
    ]


def test_templates_merge_as_pod_templates_do_and_each_part_is_named():
    wide = cluster(defaults={"pods": {"template": container(("PROXY", "p"), ("LEVEL", "low"))}})
    near = team(locked={"pods": {"template": container(("HF_ENDPOINT", "https://mirror"))}})
    own = {"pods": {"template": container(("LEVEL", "high"))}}
    spec, origins = merged(own, wide, near)
    (found,) = spec["pods"]["template"]["spec"]["containers"]
    assert {each["name"]: each["value"] for each in found["env"]} == {
        "PROXY": "p",
        "LEVEL": "high",
        "HF_ENDPOINT": "https://mirror",
    }
    assert origins == [
        "pods.template vcpo-system/default Default",
        "pods.template team-a/default Locked",
    ]


def test_a_run_may_still_take_an_operators_field_away():
    layer = cluster(defaults={"pods": {"template": {"spec": {"nodeSelector": {"pool": "gpus"}}}}})
    own = {"pods": {"template": {"spec": {"securityContext": {"fsGroup": None}}}}}
    spec, _ = merged(own, layer)
    assert spec["pods"]["template"]["spec"] == {
        "nodeSelector": {"pool": "gpus"},
        "securityContext": {"fsGroup": None},
    }


def test_defaults_that_say_what_the_run_says_anyway_come_from_nowhere():
    layer = cluster(defaults={"pods": {"transport": "Tls"}}, locked={"upgradePolicy": "OnRestart"})
    assert merged({}, layer)[1] == []


@pytest.mark.parametrize(
    "part", [{"seed": 3}, {"pods": {"queueName": "gpus"}}, {"pods": {"tokenSecret": "hub"}}]
)
def test_what_changes_the_computation_or_may_not_change_can_have_no_default(part: dict[str, Any]):
    with pytest.raises(
        ValueError, match=r"VCPORunDefaults team-a/default: `.*` can have no default"
    ):
        merged({}, team(locked=part))


def test_render_takes_defaults_from_files_and_names_them(tmp_path: Path):
    path = tmp_path / "team.yaml"
    path.write_text("{kind: VCPORunDefaults, spec: {locked: {upgradePolicy: Never}}}")
    run, origins = with_defaults(make_run(), [path])
    assert run.spec.upgrade_policy == "Never"
    assert [each.to_dict() for each in origins] == [
        {"field": "upgradePolicy", "from": str(path), "how": "Locked"}
    ]


def test_a_file_of_something_else_is_no_file_of_defaults(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("{kind: VCPORun}")
    with pytest.raises(ValueError, match=r"run\.yaml: must be a VCPORunDefaults"):
        with_defaults(make_run(), [path])


def test_a_template_that_cannot_be_merged_names_whose_it_is():
    layer = cluster(defaults={"pods": {"template": {"spec": {"containers": [{"image": "x"}]}}}})
    with pytest.raises(ValueError, match=r"vcpo-system/default: each item of `spec\.containers`"):
        merged({}, layer)
