"""The operator's pod can do its work through its own network policy, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.chart.rendering import Values, only

TEST_POD = {
    "podSelector": {
        "matchLabels": {
            "app.kubernetes.io/instance": "vcpo",
            "app.kubernetes.io/component": "test",
        }
    }
}


def egress_to(port: int, values: Values | None = None) -> list[Any]:
    """Peers to which traffic on a port may go, one entry for each rule; None is anywhere."""
    rules = only("NetworkPolicy", values)["spec"]["egress"]
    return [rule.get("to") for rule in rules if port in {each["port"] for each in rule["ports"]}]


def ingress_from(port: str, values: Values | None = None) -> list[Any]:
    rules = only("NetworkPolicy", values)["spec"]["ingress"]
    return [rule.get("from") for rule in rules if port in {each["port"] for each in rule["ports"]}]


@pytest.mark.parametrize("port", [443, 6443, 8443, 16443])
def test_the_api_server_can_be_reached_where_clusters_put_it(port):
    assert egress_to(port) == [None]


def test_the_api_server_can_be_narrowed_to_addresses():
    values = {"networkPolicy": {"apiServer": {"cidrs": ["10.0.0.1/32"]}}}
    assert egress_to(6443, values) == [[{"ipBlock": {"cidr": "10.0.0.1/32"}}]]


def test_only_learners_can_be_called_on_their_port():
    (peers,) = egress_to(7600)
    assert peers == [
        {
            "namespaceSelector": {},
            "podSelector": {"matchLabels": {"vcpo.dev/role": "learner"}},
        }
    ]


def test_nothing_else_can_be_reached():
    ports = {
        each["port"] for rule in only("NetworkPolicy")["spec"]["egress"] for each in rule["ports"]
    }
    assert ports == {53, 443, 6443, 8443, 16443, 7600}


def test_a_prometheus_that_is_asked_can_be_reached_on_the_port_of_its_pods():
    values = {"prometheus": {"url": "http://prometheus.monitoring", "podPort": 9095}}
    assert egress_to(9095, values) == [None]
    assert egress_to(9090) == []


def test_metrics_can_be_narrowed_and_the_chart_can_still_be_tested():
    peer = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
    values = {"networkPolicy": {"metricsFrom": [peer]}}
    assert ingress_from("metrics", values) == [[TEST_POD, peer]]


def test_the_test_pod_is_the_one_that_the_policy_lets_in():
    labels = only("Pod")["metadata"]["labels"].items()
    assert TEST_POD["podSelector"]["matchLabels"].items() <= labels
