"""The NetworkPolicy of a run's pods.

Let in: the run's own pods on every port, the operator on gRPC, and anybody on the metrics ports,
which show numbers only and whose scraper the operator cannot know. Under `DenyAll`, out: the run's
own pods and DNS, without which no pod finds the learner.
"""

from __future__ import annotations

from vcpo.spec.cluster import NetworkIsolation
from vcpo_operator.children.manifest import Child, Kind, Manifest, Parent, child
from vcpo_operator.names import (
    LEARNER_METRICS_PORT,
    LEARNER_PORT,
    ROLLOUT_METRICS_PORT,
    selector,
)

_OPERATOR_PODS = {
    "app.kubernetes.io/name": "vcpo",
    "app.kubernetes.io/component": "operator",
}
_DNS_PORT = 53


def network_policy(parent: Parent) -> Child | None:
    """Build the policy; None when isolation is disabled."""
    isolation = parent.run.spec.pods.network_isolation
    if isolation is NetworkIsolation.DISABLED:
        return None
    peers = {"podSelector": {"matchLabels": selector(parent.name)}}
    spec: Manifest = {
        "podSelector": {"matchLabels": selector(parent.name)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [peers]}, _from_operator(), _scrapes()],
    }
    if isolation is NetworkIsolation.DENY_ALL:
        spec["policyTypes"] = ["Ingress", "Egress"]
        spec["egress"] = [{"to": [peers]}, _names()]
    return child(Kind.NETWORK_POLICY, parent, parent.name, {"spec": spec})


def _from_operator() -> Manifest:
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": _OPERATOR_PODS}}
    return {"from": [operator], "ports": [_port(LEARNER_PORT)]}


def _scrapes() -> Manifest:
    return {"ports": [_port(LEARNER_METRICS_PORT), _port(ROLLOUT_METRICS_PORT)]}


def _names() -> Manifest:
    return {"ports": [_port(_DNS_PORT, "UDP"), _port(_DNS_PORT)]}


def _port(port: int, protocol: str = "TCP") -> Manifest:
    return {"protocol": protocol, "port": port}
