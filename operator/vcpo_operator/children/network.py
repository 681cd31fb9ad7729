"""The NetworkPolicy of a run's pods.

Allowed in: the run's own pods on the ports where the learner serves them; the learner's pods, if
there are several, on every port, since their ranks take any; the operator, in its namespace, on
gRPC; the run's namespace and those of scrapers on the metrics ports. Ranks let in who reaches them,
so no worker may: it runs what a model wrote. A label alone allows nobody from another namespace,
since anybody who may create pods there could set it. Under `DenyAll`, allowed out: the run's own
pods, DNS, without which no pod finds the learner, and the run's `extraEgress`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vcpo.api.cluster import Egress, NetworkIsolation
from vcpo.api.learner import Learner
from vcpo_operator.children.manifest import Child, Kind, Manifest, Parent, build_child
from vcpo_operator.names import (
    LEARNER_METRICS_PORT,
    LEARNER_PORT,
    LEARNER_WEIGHTS_PORT,
    ROLLOUT_METRICS_PORT,
    Role,
    selector,
)

_OPERATOR_PODS = {"app.kubernetes.io/name": "vcpo", "app.kubernetes.io/component": "operator"}
_DNS_PORTS = (53, 5353)
"""OpenShift's DNS pods listen on the second."""
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that the API server itself sets on every namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSources:
    """Who may connect besides the run's own pods."""

    operator_namespace: str = ""
    """Namespace of the operator's pods; empty: the operator runs outside the cluster."""
    monitoring_namespaces: tuple[str, ...] = ()
    """Namespaces that may read metrics, besides the run's own."""


def network_policy(parent: Parent, ingress_sources: IngressSources) -> Child | None:
    """Build the NetworkPolicy; None when isolation is disabled."""
    isolation = parent.run.spec.pods.network_isolation
    if isolation is NetworkIsolation.DISABLED:
        return None
    peers = {"podSelector": {"matchLabels": selector(parent.name)}}
    scrapers: list[Manifest] = [{"podSelector": {}}]  # all pods of the run's own namespace
    if ingress_sources.monitoring_namespaces:
        scrapers.append(_namespaces(ingress_sources.monitoring_namespaces))
    ports = [_port(LEARNER_METRICS_PORT), _port(ROLLOUT_METRICS_PORT)]
    scrapes = {"from": scrapers, "ports": ports}
    spec: Manifest = {
        "podSelector": {"matchLabels": selector(parent.name)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [peers], "ports": _served_ports(parent.run.spec.learner)},
            *_from_other_ranks(parent),
            *_from_operator(ingress_sources),
            scrapes,
        ],
    }
    if isolation is NetworkIsolation.DENY_ALL:
        spec["policyTypes"] = ["Ingress", "Egress"]
        dns = {"ports": [_port(port, name) for port in _DNS_PORTS for name in ("UDP", "TCP")]}
        extra = (_to_destination(each) for each in parent.run.spec.pods.extra_egress)
        spec["egress"] = [{"to": [peers]}, dns, *extra]
    return build_child(Kind.NETWORK_POLICY, parent, parent.name, {"spec": spec})


def _to_destination(egress: Egress) -> Manifest:
    rule: Manifest = {"ports": [_port(egress.port)]}
    if egress.cidr is not None:
        rule["to"] = [{"ipBlock": {"cidr": egress.cidr}}]
    if egress.namespace is not None:
        rule["to"] = [_namespaces([egress.namespace])]
    return rule


def _served_ports(learner: Learner) -> list[Manifest]:
    last_port = LEARNER_WEIGHTS_PORT + learner.ranks_per_replica - 1  # every rank has a server
    weights = {**_port(LEARNER_WEIGHTS_PORT), "endPort": last_port}
    return [_port(LEARNER_PORT), weights]


def _from_other_ranks(parent: Parent) -> list[Manifest]:
    if parent.run.spec.learner.replicas == 1:
        return []
    return [{"from": [{"podSelector": {"matchLabels": selector(parent.name, Role.LEARNER)}}]}]


def _from_operator(ingress_sources: IngressSources) -> list[Manifest]:
    if not ingress_sources.operator_namespace:
        return []
    operator = {
        **_namespaces([ingress_sources.operator_namespace]),
        "podSelector": {"matchLabels": _OPERATOR_PODS},
    }
    return [{"from": [operator], "ports": [_port(LEARNER_PORT)]}]


def _namespaces(names: Iterable[str]) -> Manifest:
    named = {"key": _NAMESPACE_NAME, "operator": "In", "values": sorted(names)}
    return {"namespaceSelector": {"matchExpressions": [named]}}


def _port(port: int, protocol: str = "TCP") -> Manifest:
    return {"protocol": protocol, "port": port}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDefaults:
    """The operator's own settings, for all of its runs; `--help` explains them."""

    learner_image: str
    rollout_image: str
    ingress_sources: IngressSources = field(default_factory=IngressSources)
    scrape_annotations: bool = True
    shared_pod_monitor: bool = False
    """Whether a PodMonitor of the chart selects the pods of all runs already."""
    gpu_resource_name: str = "nvidia.com/gpu"
    image_pull_secrets: Sequence[str] = ()
    listen_address: str = "0.0.0.0"  # noqa: S104 - network policies say who may connect
    pod_environment: Mapping[str, str] = field(default_factory=dict)
