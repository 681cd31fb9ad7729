"""All children of a run, in the order in which they are created; the smallest are built here."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from vcpo.api.cluster import StorageRetention, Transport
from vcpo_operator.children.learner import learner_needs, learner_stateful_set
from vcpo_operator.children.manifest import Child, Kind, Manifest, Parent, build_child
from vcpo_operator.children.network import OperatorDefaults, network_policy
from vcpo_operator.children.pod_template.resources import memory_note
from vcpo_operator.children.revision import run_config_map
from vcpo_operator.children.rollout import rollout_deployment, rollout_needs
from vcpo_operator.names import (
    GROUP_LABEL,
    LEARNER_METRICS_PORT,
    LEARNER_PORT,
    LEARNER_WEIGHTS_PORT,
    RENDEZVOUS_PORT,
    ROLE_LABEL,
    RUN_LABEL,
    Role,
    account_name,
    certificates_name,
    credential_name,
    leader_selector,
    learner_name,
    ranks_name,
    rollout_name,
    selector,
)

_NEEDS: Final = {Kind.STATEFUL_SET: learner_needs, Kind.DEPLOYMENT: rollout_needs}


def memory_notes(parent: Parent, children: Iterable[Child]) -> Iterator[str]:
    """Yield each memory limit below what the model needs, in sentences with the fix."""
    for child in children:
        if (needs := _NEEDS.get(child.kind)) is not None:
            container = child.manifest["spec"]["template"]["spec"]["containers"][0]
            yield from memory_note(child.name, container, needs(parent))


def build_children(
    parent: Parent,
    defaults: OperatorDefaults,
    *,
    replicas: Mapping[str, int] | None = None,
    running: bool = True,
) -> tuple[Child, ...]:
    """Build every child of a run that has not ended.

    What pods need comes before the pods; isolation and budgets come before what they protect.
    Raises: ValueError when a user's template cannot be merged.
    """
    groups = parent.run.spec.rollouts
    wanted = {group.name: group.min_replicas for group in groups} if replicas is None else replicas
    children = (
        certificates_secret(parent),
        keys_secret(parent),
        run_config_map(parent),
        checkpoint_claim(parent),
        learner_service(parent),
        ranks_service(parent),
        service_account(parent),
        network_policy(parent, defaults.ingress_sources),
        pod_monitor(parent, defaults),
        budget(parent, 1, Role.LEARNER),
        *(budget(parent, "50%", Role.ROLLOUT, group.name) for group in groups),
        learner_stateful_set(parent, defaults, running=running),
        *(
            rollout_deployment(parent, group, defaults, wanted[group.name] if running else 0)
            for group in groups
        ),
    )
    return tuple(child for child in children if child is not None)


def service_account(parent: Parent) -> Child:
    """Build the ServiceAccount of the pods, which has no rights."""
    body = {"automountServiceAccountToken": False}
    return build_child(Kind.SERVICE_ACCOUNT, parent, account_name(parent.name), body)


def keys_secret(parent: Parent) -> Child | None:
    """Build the Secret without its keys; None when the user names one.

    The executor makes the content of a Secret, which the plan does not know. Keys cannot be
    changed, only deleted: the operator then creates others and replaces the pods.
    """
    if parent.run.spec.pods.keys_secret_name is not None:
        return None
    body = {"type": "Opaque", "immutable": True}
    return build_child(Kind.SECRET, parent, credential_name(parent.name), body)


def certificates_secret(parent: Parent) -> Child | None:
    """Build the Secret without its certificates; None for plain text, or if the user names one.

    They are renewed in their Secret, and pods read them again.
    """
    pods = parent.run.spec.pods
    if pods.transport is Transport.PLAIN_TEXT or pods.tls_secret_name is not None:
        return None
    body = {"type": "Opaque"}
    return build_child(Kind.SECRET, parent, certificates_name(parent.name), body)


def budget(parent: Parent, most: int | str, role: Role, group: str | None = None) -> Child:
    """Build the budget of a role's pods, or a group's; 0 would block node drains.

    A pod that does not work may always be evicted: it loses nothing, and a run that is broken
    would otherwise keep its nodes for ever.
    most: Pods that may be away at a time.
    """
    body = {
        "spec": {
            "maxUnavailable": most,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(parent.name, role, group)},
        }
    }
    name = learner_name(parent.name) if group is None else rollout_name(parent.name, group)
    return build_child(Kind.BUDGET, parent, name, body, role=role, group=group)


def checkpoint_claim(parent: Parent) -> Child:
    """Build the claim; it outlives the run unless the spec says otherwise.

    Claim templates of a StatefulSet cannot grow, and go with it. Pods that train together write
    into one volume; its access mode cannot change.
    """
    learner = parent.run.spec.learner
    spec: Manifest = {
        "accessModes": ["ReadWriteOnce" if learner.replicas == 1 else "ReadWriteMany"],
        "resources": {"requests": {"storage": f"{parent.run.spec.checkpoint_storage_gibibytes}Gi"}},
    }
    if learner.checkpoint_storage_class_name is not None:
        spec["storageClassName"] = learner.checkpoint_storage_class_name
    return build_child(
        Kind.CLAIM,
        parent,
        learner_name(parent.name),
        {"spec": spec},
        role=Role.LEARNER,
        owned=learner.checkpoint_storage_retention is StorageRetention.DELETE,
    )


def learner_service(parent: Parent) -> Child:
    """Build the Service of rank 0."""
    ports = {"grpc": LEARNER_PORT, "metrics": LEARNER_METRICS_PORT, "weights": LEARNER_WEIGHTS_PORT}
    listed = [{"name": name, "port": port, "targetPort": name} for name, port in ports.items()]
    return _headless(parent, learner_name(parent.name), leader_selector(parent.name), listed)


def ranks_service(parent: Parent) -> Child | None:
    """Build the Service of all ranks; None if the learner has one pod."""
    if parent.run.spec.learner.replicas == 1:
        return None
    listed = [{"name": "rendezvous", "port": RENDEZVOUS_PORT}]
    pods = selector(parent.name, Role.LEARNER)
    return _headless(parent, ranks_name(parent.name), pods, listed)


def _headless(
    parent: Parent, name: str, pods: Mapping[str, str], ports: list[dict[str, Any]]
) -> Child:
    """Build a Service that gives pods of the learner their addresses, ready or not."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": dict(pods)}
    body = {"spec": {**spec, "ports": ports}}
    return build_child(Kind.SERVICE, parent, name, body, role=Role.LEARNER)


def pod_monitor(parent: Parent, defaults: OperatorDefaults) -> Child | None:
    """Build the PodMonitor; None unless the run asks for it, or if the chart's selects its pods.

    Two monitors would scrape each pod twice, and every `sum()` would count double.
    """
    if not parent.run.spec.pods.pod_monitor or defaults.shared_pod_monitor:
        return None
    body = {
        "spec": {
            "jobLabel": "app.kubernetes.io/name",
            "selector": {"matchLabels": selector(parent.name)},
            "podTargetLabels": [RUN_LABEL, ROLE_LABEL, GROUP_LABEL],
            "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
        }
    }
    return build_child(Kind.POD_MONITOR, parent, parent.name, body)


def skipped_monitor_note(parent: Parent, defaults: OperatorDefaults) -> str:
    """Return a sentence if the run asks for a PodMonitor and gets none; else an empty string."""
    if not parent.run.spec.pods.pod_monitor or not defaults.shared_pod_monitor:
        return ""
    return (
        "The run gets no PodMonitor of its own (`pods.podMonitor`), because the chart's"
        " (`metrics.podMonitor`) selects its pods already: two would count everything double."
    )
