"""All children of a run, in the order in which they are created; the smallest are built here."""

from __future__ import annotations

from collections.abc import Mapping

from vcpo.api.cluster import StorageRetention, Transport
from vcpo_operator.children.config import run_config_map
from vcpo_operator.children.defaults import OperatorDefaults
from vcpo_operator.children.learner import learner_stateful_set
from vcpo_operator.children.manifest import Child, Kind, Manifest, Parent, build_child
from vcpo_operator.children.monitor import pod_monitor
from vcpo_operator.children.network import network_policy
from vcpo_operator.children.rollout import rollout_deployment
from vcpo_operator.children.service import learner_service, ranks_service
from vcpo_operator.names import (
    Role,
    account_name,
    certificates_name,
    credential_name,
    learner_name,
    rollout_name,
    selector,
)


def build_children(
    parent: Parent,
    defaults: OperatorDefaults,
    *,
    replicas: Mapping[str, int] | None = None,
    running: bool = True,
) -> tuple[Child, ...]:
    """Build every child of a run that has not ended.

    What pods need comes before the pods; isolation and budgets come before what they protect.
    replicas: Workers of each group; None is the least of each.
    running: False while the run is suspended, which then has no pods.
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
        learner_budget(parent),
        *(rollout_budget(parent, group.name) for group in groups),
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


def learner_budget(parent: Parent) -> Child:
    """Build the budget of the learner, which saves on SIGTERM: 0 would block node drains."""
    body = {
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(parent.name, Role.LEARNER)},
        }
    }
    return build_child(Kind.BUDGET, parent, learner_name(parent.name), body, role=Role.LEARNER)


def rollout_budget(parent: Parent, group: str) -> Child:
    """Build the budget of a rollout group."""
    body = {
        "spec": {
            "maxUnavailable": "50%",
            "selector": {"matchLabels": selector(parent.name, Role.ROLLOUT, group)},
        }
    }
    name = rollout_name(parent.name, group)
    return build_child(Kind.BUDGET, parent, name, body, role=Role.ROLLOUT, group=group)


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
