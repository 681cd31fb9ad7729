"""The chart starts the operator as the operator understands it, and grants what its code asks."""

import re

import pytest

from tests.fixtures.chart.rendering import NAMESPACE, of_kind, only, operator_pod
from tests.fixtures.chart.variants import EVERYTHING, all_variants
from vcpo.api import VCPORun
from vcpo.wire.access.roles import CallerRole
from vcpo_operator.__main__ import operator_defaults, parser
from vcpo_operator.children import Child, Kind, OperatorDefaults, build_children
from vcpo_operator.children.manifest import Owner
from vcpo_operator.children.network import IngressSources
from vcpo_operator.children.revision import make_parent
from vcpo_operator.names import LEARNER_PORT, ROLE_LABEL, RunKey

VARIANTS = all_variants()
RUN = {
    "metadata": {"name": "demo"},
    "spec": {
        "model": {"name": "m"},
        "environment": {"name": "countdown"},
        "steps": 1,
        "pods": {"podMonitor": True},
    },
}


def container(values=None):
    return operator_pod(values)["containers"][0]


def parse(values=None):
    return parser().parse_args(container(values)["args"])


def family() -> dict[Kind, Child]:
    owner = Owner(key=RunKey("team-a", "demo"), uid="u")
    ingress_sources = IngressSources(
        operator_namespace=NAMESPACE, monitoring_namespaces=("monitoring",)
    )
    defaults = OperatorDefaults(
        learner_image="l", rollout_image="r", ingress_sources=ingress_sources
    )
    made = build_children(make_parent(VCPORun.model_validate(RUN), owner), defaults)
    return {child.kind: child for child in made}


def verbs_on(group: str, resource: str) -> set[str]:
    (role,) = [r for r in of_kind("ClusterRole") if r["metadata"]["name"] == "vcpo-operator"]
    return {
        verb
        for rule in role["rules"]
        if group in rule["apiGroups"] and resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_operator_knows_every_option_by_its_full_name(values):
    known = re.findall(r"--[a-z-]+", parser().format_help())
    assert {each.split("=")[0] for each in container(values)["args"]} <= set(known)
    assert parse(values)


def test_runs_get_the_images_of_the_values():
    images = {"learner": {"tag": "2"}, "rollout": {"repository": "vcpo-rollout-cpu"}}
    arguments = parse({"images": images})
    assert arguments.learner_image == "vcpo-learner:2"
    assert arguments.rollout_image == "vcpo-rollout-cpu:0.1.0"


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_the_ports_of_the_pod_are_those_listened_on_and_runs_listen_alike(host):
    ports = {port["name"]: f"{host}:{port['containerPort']}" for port in container()["ports"]}
    arguments = parse({"listenAddress": host})
    assert ports == {"metrics": arguments.metrics_listen, "health": arguments.liveness_listen}
    owner = Owner(key=RunKey("team-a", "demo"), uid="u")
    parent = make_parent(VCPORun.model_validate(RUN), owner)
    for child in build_children(parent, operator_defaults(arguments)):
        if child.kind in {Kind.STATEFUL_SET, Kind.DEPLOYMENT}:
            (made,) = child.manifest["spec"]["template"]["spec"]["containers"]
            listening = [each for each in made["command"] if "listen=" in each]
            assert len(listening) >= 3
            assert all(f"={host}:" in each for each in listening)


def test_the_operator_has_no_key_of_a_run_in_its_environment():
    names = {each["name"] for each in container(EVERYTHING)["env"]}
    assert not names & {role.variable for role in CallerRole}
    assert [each["name"] for each in container()["env"]] == ["POD_NAME"]  # which log lines have


@pytest.mark.parametrize("kind", [Kind.CLAIM, Kind.SECRET])
def test_the_operator_may_not_delete_checkpoints_and_models_and_secrets(kind):
    assert "delete" not in verbs_on("", kind.plural)


def test_the_policy_of_a_run_lets_the_operators_pod_in():
    policy = family()[Kind.NETWORK_POLICY].manifest["spec"]
    (rule,) = [
        rule
        for rule in policy["ingress"]
        if rule.get("ports") == [{"protocol": "TCP", "port": LEARNER_PORT}]
    ]
    labels = only("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    assert all(peer["podSelector"]["matchLabels"].items() <= labels for peer in rule["from"])
    (peer,) = rule["from"]
    (named,) = peer["namespaceSelector"]["matchExpressions"]
    assert named["values"] == [only("Deployment")["metadata"]["namespace"]]


def test_the_policy_of_the_operator_lets_it_call_learners():
    pod = family()[Kind.STATEFUL_SET].manifest["spec"]["template"]["metadata"]["labels"]
    rules = only("NetworkPolicy")["spec"]["egress"]
    (rule,) = [r for r in rules if {"port": LEARNER_PORT, "protocol": "TCP"} in r["ports"]]
    assert rule["to"][0]["podSelector"]["matchLabels"] == {ROLE_LABEL: pod[ROLE_LABEL]}


def test_the_pod_monitor_of_all_runs_finds_the_port_and_the_labels_of_their_pods():
    monitor = only("PodMonitor", EVERYTHING)["spec"]
    template = family()[Kind.DEPLOYMENT].manifest["spec"]["template"]
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert monitor["podMetricsEndpoints"][0]["port"] in ports
    assert set(monitor["podTargetLabels"]) <= set(template["metadata"]["labels"])
