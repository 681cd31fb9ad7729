"""Names, labels, annotations and ports: every word that manifests and watchers share."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

GROUP: Final = "vcpo.dev"
VERSION: Final = "v1alpha1"
PLURAL: Final = "vcporuns"
SCALER_KIND: Final = "VCPORolloutScaler"
SCALER_PLURAL: Final = "vcporolloutscalers"

OPERATOR_MANAGER: Final = "vcpo.dev/operator"
"""Value of `spec.managedBy` that means this operator; so does leaving it out."""

FIELD_MANAGER: Final = "vcpo-operator"
"""Field manager of everything applied, status included."""

SCALE_MANAGER: Final = "vcpo-autoscaler"
"""Field manager of `spec.replicas` of rollout Deployments; the operator proper never sets it."""

RUN_LABEL: Final = "vcpo.dev/run"
"""Name of the run that a child or pod belongs to; selectors and watches stand on it."""

ROLE_LABEL: Final = "vcpo.dev/role"
"""A `Role`; immutable part of selectors."""

GROUP_LABEL: Final = "vcpo.dev/group"
"""Rollout group of a Deployment, its pods and its budget; immutable part of selectors."""

QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Kueue's LocalQueue for a workload; read when the workload is created."""

HASH_ANNOTATION: Final = "vcpo.dev/manifest-hash"
"""Digest of the manifest that was applied; a differing one means that the wish has changed."""

TEMPLATE_HASH_ANNOTATION: Final = "vcpo.dev/template-hash"
"""Digest of a pod template, on the pods: tells pods of an older template from current ones."""

DELETION_COST_ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Which pod a ReplicaSet removes first: the cheapest. Here: trajectories in flight."""

LEARNER_PORT: Final = 7600
LEARNER_METRICS_PORT: Final = 7601
ROLLOUT_PORT: Final = 7610
ROLLOUT_METRICS_PORT: Final = 7611

RUN_FILE: Final = "run.yaml"
"""Key of the ConfigMap, and file name in the pods."""

TOKEN_KEY: Final = "token"  # noqa: S105 - the key's name, not a secret
"""Key of the Secret named by `spec.pods.tokenSecretName`."""


class Role(StrEnum):
    """What a pod does for its run; also its container's name."""

    LEARNER = "learner"
    ROLLOUT = "rollout"


class RunKey(NamedTuple):
    """Identity of a run in the cluster; what is queued."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Show as people write it."""
        return f"{self.namespace}/{self.name}"


def learner_name(run: str) -> str:
    """Name of the learner's StatefulSet, Service, claim and budget."""
    return f"{run}-learner"


def rollout_name(run: str, group: str) -> str:
    """Name of a rollout group's Deployment and budget."""
    return f"{run}-rollout-{group}"


def scaler_name(run: str, group: str) -> str:
    """Name of a rollout group's VCPORolloutScaler."""
    return f"{run}-{group}"


def config_name(run: str) -> str:
    """Name of the ConfigMap with the run file."""
    return f"{run}-config"


def account_name(run: str) -> str:
    """Name of the ServiceAccount of the run's pods."""
    return f"{run}-workload"


def learner_address(key: RunKey) -> str:
    """Where a run's learner answers gRPC calls inside the cluster."""
    return f"{learner_name(key.name)}.{key.namespace}.svc:{LEARNER_PORT}"


def labels(run: str, role: Role | None = None, group: str | None = None) -> dict[str, str]:
    """Labels of a child: the recommended ones of Kubernetes and our own."""
    named = {
        "app.kubernetes.io/name": "vcpo",
        "app.kubernetes.io/instance": run,
        "app.kubernetes.io/part-of": "vcpo",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        RUN_LABEL: run,
    }
    if role is not None:
        named |= {"app.kubernetes.io/component": role.value, ROLE_LABEL: role.value}
    if group is not None:
        named[GROUP_LABEL] = group
    return named


def selector(run: str, role: Role | None = None, group: str | None = None) -> dict[str, str]:
    """The immutable labels among `labels`: what selectors may stand on."""
    chosen = {RUN_LABEL: run}
    if role is not None:
        chosen[ROLE_LABEL] = role.value
    if group is not None:
        chosen[GROUP_LABEL] = group
    return chosen
