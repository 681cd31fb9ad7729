"""Which revision a run's pods have after an edit or an upgrade of the operator."""

import dataclasses
from typing import Any

import pytest

from tests.fixtures.operator.runs import DEFAULTS, make_run, parent
from vcpo_operator.children import OperatorDefaults, build_children
from vcpo_operator.children.manifest import Kind
from vcpo_operator.children.revision import Revision
from vcpo_operator.decisions.desired import decide_revision
from vcpo_operator.names import REVISION_ANNOTATION

UPGRADED = dataclasses.replace(DEFAULTS, learner_image="learner:2")


def revision(
    defaults: OperatorDefaults = DEFAULTS, generation: int = 1, keys: str = "k", **spec: Any
) -> Revision:
    built_from = dataclasses.replace(parent(**spec), generation=generation, credential_uid=keys)
    return Revision.of(built_from, build_children(built_from, defaults))


def is_taken(newest: Revision, kept: Revision, *, down: bool = False, **spec: Any) -> bool:
    taken, pending = decide_revision(newest, kept, make_run(**spec).spec, is_learner_down=down)
    assert bool(pending) is (taken is not newest)
    return taken is newest


@pytest.mark.parametrize(
    ("policy", "up", "down"),
    [("OnRestart", False, True), ("Recreate", True, True), ("Never", False, False)],
)
def test_an_upgrade_of_the_operator_waits_as_the_policy_says(policy, up, down):
    newest, kept, spec = revision(UPGRADED), revision(), {"upgradePolicy": policy}
    assert is_taken(newest, kept, down=False, **spec) is up
    assert is_taken(newest, kept, down=True, **spec) is down


@pytest.mark.parametrize("policy", ["OnRestart", "Recreate", "Never"])
def test_an_edit_and_new_keys_take_the_newest_whatever_the_policy(policy):
    edited = revision(UPGRADED, generation=2, learner={"threads": 2})
    assert is_taken(edited, revision(), upgradePolicy=policy)
    assert is_taken(revision(UPGRADED, keys="new"), revision(), upgradePolicy=policy)


@pytest.mark.parametrize(
    "spec",
    [
        {"suspend": True},
        {"rollouts": [{"name": "main", "maxReplicas": 9}]},
        {"upgradePolicy": "Never"},
    ],
)
def test_an_edit_that_no_pod_feels_brings_no_upgrade_with_it(spec):
    assert not is_taken(revision(UPGRADED, generation=2, **spec), revision())


def test_an_edit_that_no_pod_feels_is_noted_and_replaces_none():
    newest = revision(generation=2, activeDeadlineSeconds=60)
    assert is_taken(newest, revision())
    assert newest.templates == revision().templates


def test_more_steps_alone_wait_until_the_learner_has_taken_the_old_number():
    newest, kept = revision(generation=2, steps=20), revision(steps=10)
    assert not is_taken(newest, kept, steps=20)
    assert is_taken(newest, kept, down=True, steps=20)


@pytest.mark.parametrize(
    "spec",
    [
        {"optimizer": {"schedule": "linear"}},
        {"rollouts": [{"name": "main", "noise": {}}]},
        {"sampling": {"temperature": 0.5}},
    ],
)
def test_more_steps_with_another_edit_or_where_the_steps_before_feel_them_are_taken(spec):
    kept_spec = {} if "sampling" in spec else spec
    newest = revision(generation=2, steps=20, **spec)
    assert is_taken(newest, revision(steps=10, **kept_spec), steps=20, **spec)


def test_fewer_steps_are_an_edit():
    assert is_taken(revision(generation=2, steps=5), revision(steps=10), steps=5)


def test_a_kept_revision_gives_back_run_file_and_templates_as_they_were():
    built_from = parent()
    kept, newest = revision(), build_children(built_from, UPGRADED)
    learner = next(kept.apply_to(each) for each in newest if each.kind is Kind.STATEFUL_SET)
    assert learner.manifest["spec"]["template"] == kept.templates["demo-learner"]
    config = next(kept.apply_to(each) for each in newest if each.kind is Kind.CONFIG_MAP)
    assert config.manifest["data"] == {"run.yaml": kept.run_file}
    note = config.manifest["metadata"]["annotations"][REVISION_ANNOTATION]
    assert Revision.from_json(note) == kept


def test_a_note_of_another_version_is_no_revision():
    assert Revision.from_json('{"fields": {}}') is None
    assert Revision.from_json(None) is None
