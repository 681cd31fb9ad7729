"""The sources that a run's network policy admits; a label alone admits no other namespace."""

from typing import Any

import pytest

from tests.fixtures.operator.runs import parent
from vcpo_operator.children.network import IngressSources, network_policy

VISITORS = IngressSources(
    operator_namespace="vcpo-system", monitoring_namespaces=("obs", "monitoring")
)
GRPC, METRICS = 7600, {7601, 7611}
OWN_PODS = [{"podSelector": {"matchLabels": {"vcpo.dev/run": "demo"}}}]


def ingress(ingress_sources: IngressSources = VISITORS, **learner: int) -> list[dict[str, Any]]:
    policy = network_policy(parent(learner=learner), ingress_sources)
    assert policy is not None
    rules: list[dict[str, Any]] = policy.manifest["spec"]["ingress"]
    return rules


def ports(rule: dict[str, Any]) -> set[int]:
    return {each["port"] for each in rule.get("ports", ())}


def namespaces(peer: dict[str, Any]) -> list[str] | None:
    """Names of the namespaces that a peer is in; None: the policy's own."""
    if "namespaceSelector" not in peer:
        return None
    (named,) = peer["namespaceSelector"]["matchExpressions"]
    assert (named["key"], named["operator"]) == ("kubernetes.io/metadata.name", "In")
    values: list[str] = named["values"]
    return values


def test_the_runs_own_pods_reach_the_learner_where_it_serves_in_their_namespace_only():
    (own,) = (rule for rule in ingress() if rule["from"] == OWN_PODS)
    weights = {"protocol": "TCP", "port": 7620, "endPort": 7620}
    assert own["ports"] == [{"protocol": "TCP", "port": 7600}, weights]


@pytest.mark.parametrize(
    ("learner", "sources"),
    [
        ({}, []),
        ({"processes": 4}, []),
        (
            {"replicas": 2},
            [
                {
                    "podSelector": {
                        "matchLabels": {"vcpo.dev/run": "demo", "vcpo.dev/role": "learner"}
                    }
                }
            ],
        ),
    ],
)
def test_the_ports_of_ranks_are_open_to_the_learners_other_pods_alone(learner, sources):
    # The store where they meet, and every port that gloo and NCCL take (32768 to 60999 on Linux).
    for port in (29_500, 32_768, 45_000, 60_999):
        rules = [rule for rule in ingress(**learner) if admits(rule, port)]
        assert [peer for rule in rules for peer in rule["from"]] == sources


def test_every_rank_of_a_pod_is_reached_where_it_sends_weights():
    (own,) = (rule for rule in ingress(replicas=2, processes=4) if rule["from"] == OWN_PODS)
    assert [port for port in range(7600, 7700) if admits(own, port)] == [7600, *range(7620, 7624)]


def admits(rule: dict[str, Any], port: int) -> bool:
    ranges = [(each["port"], each.get("endPort", each["port"])) for each in rule.get("ports", ())]
    return not ranges or any(low <= port <= high for low, high in ranges)


def test_the_operator_is_let_in_from_its_own_namespace():
    (rule,) = (rule for rule in ingress() if ports(rule) == {GRPC})
    (peer,) = rule["from"]
    assert namespaces(peer) == ["vcpo-system"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"


def test_an_operator_that_is_in_no_namespace_needs_no_rule():
    assert not [rule for rule in ingress(IngressSources()) if ports(rule) == {GRPC}]


def test_metrics_are_read_from_the_own_namespace_and_from_those_that_monitor():
    (rule,) = (rule for rule in ingress() if ports(rule) == METRICS)
    assert [namespaces(peer) for peer in rule["from"]] == [None, ["monitoring", "obs"]]


def test_without_a_monitoring_namespace_only_the_own_one_reads_metrics():
    (rule,) = (rule for rule in ingress(IngressSources()) if ports(rule) == METRICS)
    assert rule["from"] == [{"podSelector": {}}]


def test_no_rule_admits_every_namespace():
    peers = [peer for rule in ingress() for peer in rule["from"]]
    assert all(peer.get("namespaceSelector") != {} for peer in peers)


def test_further_destinations_may_be_reached_where_all_else_is_denied():
    destinations = [
        {"port": 443},
        {"port": 5000, "cidr": "10.1.0.0/16"},
        {"port": 4317, "namespace": "tracing"},
    ]
    pods = {"networkIsolation": "DenyAll", "extraEgress": destinations}
    policy = network_policy(parent(pods=pods), VISITORS)
    assert policy is not None
    anywhere, addresses, namespace = policy.manifest["spec"]["egress"][2:]
    assert (ports(anywhere), "to" in anywhere) == ({443}, False)
    assert (ports(addresses), addresses["to"]) == ({5000}, [{"ipBlock": {"cidr": "10.1.0.0/16"}}])
    assert (ports(namespace), namespaces(namespace["to"][0])) == ({4317}, ["tracing"])
