"""The whole operator in this process, kopf included, against a fake API server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.fixtures.kubernetes.waiting import until_stored
from tests.fixtures.operator.operator import RUN, operator_fixture, whole_operator
from tests.fixtures.operator.runs import DEFAULTS
from vcpo.api import VCPORun
from vcpo_operator.children import Child, Kind, build_children
from vcpo_operator.children.manifest import Owner
from vcpo_operator.children.revision import make_parent
from vcpo_operator.handlers import Health
from vcpo_operator.names import (
    RunKey,
    account_name,
    base_name,
    config_name,
    learner_name,
    rollout_name,
)

OWNED = {
    "ConfigMap": ("", "configmaps", "demo-config"),
    "Service": ("", "services", "demo-learner"),
    "ServiceAccount": ("", "serviceaccounts", "demo-workload"),
    "NetworkPolicy": ("networking.k8s.io", "networkpolicies", "demo"),
    "PodDisruptionBudget": ("policy", "poddisruptionbudgets", "demo-learner"),
    "StatefulSet": ("apps", "statefulsets", "demo-learner"),
    "Deployment": ("apps", "deployments", "demo-rollout-main"),
}


async def test_every_child_that_somebody_deletes_comes_back_at_once_with_an_event():
    async with operator_fixture() as operator, whole_operator(operator):
        store = operator.server.api.store

        def uid(kind: str) -> str | None:
            group, plural, name = OWNED[kind]
            found = store.get((group, plural), "default", name)
            return None if found is None else str(found["metadata"]["uid"])

        def recreated() -> set[str]:
            events = store.objects(("", "events"), "default")
            told = (each["message"] for each in events if each["reason"] == "Recreated")
            return {message.split()[0] for message in told}

        await operator.create()
        await until_stored(operator.server, lambda: None not in map(uid, OWNED))
        await until_stored(operator.server, lambda: has_status(store))
        before = {kind: uid(kind) for kind in OWNED}
        for group, plural, name in OWNED.values():
            version = {"networking.k8s.io": "v1", "policy": "v1", "apps": "v1"}.get(group)
            root = f"/apis/{group}/{version}" if group else "/api/v1"
            await operator.client.delete(f"{root}/namespaces/default/{plural}/{name}")
        # The run is looked at every two seconds besides; no clock of the operator is turned here.
        await until_stored(
            operator.server, lambda: all(uid(kind) not in {None, before[kind]} for kind in OWNED)
        )
        await until_stored(operator.server, lambda: set(OWNED) <= recreated())
        metadata = (await operator.client.get(RUN))["metadata"]
        assert not {"finalizers", "annotations"} & set(metadata)


def has_status(store) -> bool:
    body = store.get(("vcpo.dev", "vcporuns"), "default", "demo")
    return body is not None and bool(body.get("status"))


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((0.0, 0.0, 0.0), ""),
        ((121.0, 0.0, 0.0), "a run has been due for 121 s"),
        ((0.0, 5.1, 0.0), "the event loop is 5.1 s late"),
        ((0.0, 0.0, 130.0), "the watch has not shown the operator's own write for 130 s"),
    ],
)
def test_liveness_names_what_is_stuck(numbers: tuple[float, ...], problem: str):
    wait_s, lag_s, echo_s = numbers
    health = Health(
        oldest_wait_s=lambda: wait_s, loop_lag_s=lambda: lag_s, observed_write_lag_s=lambda: echo_s
    )
    assert health.problem() == problem


IMAGES = ("--learner-image=l", "--rollout-image=r")


def operate(folder: Path) -> subprocess.CompletedProcess[str]:
    """Start the operator where there is no service account, in an empty home."""
    (folder / "kubeconfig").write_text("")
    outside = {key: value for key, value in os.environ.items() if "KUBERNETES" not in key}
    places = {"HOME": str(folder), "KUBECONFIG": str(folder / "kubeconfig")}
    command = [sys.executable, "-m", "vcpo_operator", *IMAGES]
    command += ["--metrics-listen=127.0.0.1:0", "--liveness-listen=127.0.0.1:0"]
    return subprocess.run(
        command, env=outside | places, capture_output=True, text=True, timeout=60, check=False
    )


def test_without_a_cluster_the_operator_says_what_it_needs(tmp_path: Path):
    ended = operate(tmp_path)
    assert ended.returncode == 2
    assert " CRITICAL cannot reach the API server: " in ended.stderr
    assert "set KUBECONFIG to a kubeconfig that names a cluster" in ended.stderr
    assert "Traceback" not in ended.stderr


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
