"""Names of a run's objects: valid for their kinds, and never shared."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.fixtures.operator.runs import DEFAULTS
from vcpo.api import VCPORun
from vcpo_operator.children import Child, Kind, build_children
from vcpo_operator.children.manifest import Owner
from vcpo_operator.children.revision import make_parent
from vcpo_operator.names import (
    RunKey,
    account_name,
    base_name,
    config_name,
    learner_name,
    rollout_name,
)

HOST_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1035, what Services must be called."""
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
WORDS = ("a", "b", "x", "rollout", "learner", "config", "7", "dcbqrstp")
"""The last one looks like a digest of ours."""


def joined_words(separators: str, longest: int) -> st.SearchStrategy[str]:
    """Words with separators between them: names that are easily mistaken for each other."""
    word, separator = st.sampled_from(WORDS), st.sampled_from(separators)
    more = st.lists(st.tuples(separator, word), max_size=4)
    built = st.builds(lambda first, rest: first + "".join(map("".join, rest)), word, more)
    return built.filter(lambda name: len(name) <= longest)


RUNS = joined_words("-.", 40)
PAIRS = st.tuples(RUNS, joined_words("-", 20))


def family(run: str, *groups: str) -> tuple[Child, ...]:
    document = {
        "metadata": {"name": run},
        "spec": {
            "model": {"name": "m"},
            "environment": {"name": "countdown"},
            "steps": 1,
            "rollouts": [{"name": group} for group in groups],
            "pods": {"podMonitor": True},
        },
    }
    owner = Owner(key=RunKey("team-a", run), uid="u")
    return build_children(make_parent(VCPORun.model_validate(document), owner), DEFAULTS)


@pytest.mark.parametrize("run", ["demo", "sort-digits", "countdown-20260101", "run-1a2b3c4d"])
def test_a_name_that_hosts_may_have_is_used_as_it_is(run):
    assert base_name(run) == run
    assert learner_name(run) == f"{run}-learner"
    assert rollout_name(run, "main") == f"{run}-rollout-main"


@pytest.mark.parametrize(
    ("run", "start"),
    [
        ("qwen2.5-run", "qwen2-5-run-"),
        ("7b", "run-7b-"),
        ("a.b", "a-b-"),
        ("9." * 19 + "9", "run-"),
    ],
)
def test_a_name_with_dots_or_a_digit_first_is_spelt_for_hosts(run, start):
    assert base_name(run).startswith(start)
    assert HOST_NAME.fullmatch(learner_name(run))


@given(one=PAIRS, other=PAIRS)
@example(one=("x", "b-rollout-c"), other=("x-rollout-b", "c"))
def test_no_two_groups_share_a_name_and_none_has_a_learners(one, other):
    if one != other:
        assert rollout_name(*one) != rollout_name(*other)
    assert rollout_name(*one) != learner_name(other[0])


@given(one=RUNS, other=RUNS)
@example(one="a.b", other=base_name("a.b"))
def test_no_two_runs_share_a_name(one, other):
    if one != other:
        for name in (base_name, learner_name, config_name, account_name):
            assert name(one) != name(other)


@given(pair=PAIRS)
def test_every_name_is_one_that_its_kind_may_have(pair):
    run, group = pair
    assert HOST_NAME.fullmatch(learner_name(run))
    # A label tells the pods of a StatefulSet's revision: its name, a dash and ten letters.
    assert len(learner_name(run)) <= 52
    for name in (rollout_name(run, group), config_name(run), account_name(run)):
        assert SUBDOMAIN.fullmatch(name)
        assert len(name) <= 253


@pytest.mark.parametrize("run", ["qwen2.5-run", "7b", "a" * 40])
def test_every_label_of_a_family_is_one_that_kubernetes_takes(run):
    for child in family(run, "main"):
        for value in child.manifest["metadata"]["labels"].values():
            assert LABEL_VALUE.fullmatch(value)
        if child.kind in {Kind.SERVICE, Kind.STATEFUL_SET}:
            assert HOST_NAME.fullmatch(child.name)


def test_workers_of_a_run_with_dots_find_their_learner():
    made = {child.kind: child for child in family("qwen2.5-run", "main")}
    (container,) = made[Kind.DEPLOYMENT].manifest["spec"]["template"]["spec"]["containers"]
    assert f"--learner={made[Kind.SERVICE].name}:7600" in container["command"]
    assert made[Kind.STATEFUL_SET].manifest["spec"]["serviceName"] == made[Kind.SERVICE].name


@pytest.mark.parametrize("name", ["Qwen", "a..b", "-a", "a-", ".a", "a_b", "a" * 41, ""])
def test_a_name_that_no_object_may_have_is_refused(name):
    with pytest.raises(ValidationError, match=r"metadata\.name"):
        family(name, "main")
