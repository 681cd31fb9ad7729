"""The NetworkPolicy of a run's pods.

Let in: the run's own pods on every port, the operator in its namespace on gRPC, and on the metrics
ports the run's own namespace and those where scrapers are. A label alone lets nobody in from
another namespace: whoever may make pods there could carry it. Under `DenyAll`, out: the run's own
pods and DNS, without which no pod finds the learner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vcpo.spec.cluster import NetworkIsolation
from vcpo_operator.children.manifest import Child, Kind, Manifest, Parent, build_child
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
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that the API server itself gives every namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSources:
    """Who is let in besides the run's own pods."""

    operator_namespace: str = ""
    """Where the operator's pods are; empty: it is in none, and no pod of it is let in."""
    monitoring_namespaces: tuple[str, ...] = ()
    """Where those are who read metrics, besides the run's own namespace."""


def network_policy(parent: Parent, ingress_sources: IngressSources) -> Child | None:
    """Build the policy; None when isolation is disabled."""
    isolation = parent.run.spec.pods.network_isolation
    if isolation is NetworkIsolation.DISABLED:
        return None
    peers = {"podSelector": {"matchLabels": selector(parent.name)}}
    spec: Manifest = {
        "podSelector": {"matchLabels": selector(parent.name)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [peers]}, *_from_operator(ingress_sources), _scrapes(ingress_sources)],
    }
    if isolation is NetworkIsolation.DENY_ALL:
        spec["policyTypes"] = ["Ingress", "Egress"]
        spec["egress"] = [{"to": [peers]}, _names()]
    return build_child(Kind.NETWORK_POLICY, parent, parent.name, {"spec": spec})


def _from_operator(ingress_sources: IngressSources) -> list[Manifest]:
    if not ingress_sources.operator_namespace:
        return []
    operator = {
        **_namespaces([ingress_sources.operator_namespace]),
        "podSelector": {"matchLabels": _OPERATOR_PODS},
    }
    return [{"from": [operator], "ports": [_port(LEARNER_PORT)]}]


def _scrapes(ingress_sources: IngressSources) -> Manifest:
    own_namespace: Manifest = {"podSelector": {}}
    scrapers = [own_namespace]
    if ingress_sources.monitoring_namespaces:
        scrapers.append(_namespaces(ingress_sources.monitoring_namespaces))
    ports = [_port(LEARNER_METRICS_PORT), _port(ROLLOUT_METRICS_PORT)]
    return {"from": scrapers, "ports": ports}


def _namespaces(names: Iterable[str]) -> Manifest:
    named = {"key": _NAMESPACE_NAME, "operator": "In", "values": sorted(names)}
    return {"namespaceSelector": {"matchExpressions": [named]}}


def _names() -> Manifest:
    return {"ports": [_port(_DNS_PORT, "UDP"), _port(_DNS_PORT)]}


def _port(port: int, protocol: str = "TCP") -> Manifest:
    return {"protocol": protocol, "port": port}
