"""Settings that only a cluster uses: images, scheduling, isolation, volumes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from vcpo.spec.fields import DnsSubdomain, Section

PodTemplate = Annotated[dict[str, Any], Field(json_schema_extra={"type": "object"})]
"""Part of a Kubernetes PodTemplateSpec (`metadata` and `spec`), merged over the operator's."""

Image = Annotated[str, Field(min_length=1, max_length=512)]
"""Reference of a container image."""

DrainSeconds = Annotated[int, Field(ge=1, le=3600)]
"""Time for a graceful shutdown, in seconds, at most one hour."""

ObjectName = Annotated[DnsSubdomain, Field(min_length=1)]
"""Name of an object of the cluster."""


class Scaling(StrEnum):
    """Who sets the number of workers of a group."""

    DIRECT = "Direct"
    """The operator, from the learner's signals."""
    EXTERNAL = "External"
    """An autoscaler or a person, on the group's VCPORolloutScaler; the operator follows it."""


class StorageRetention(StrEnum):
    """Whether a run's volume outlives the run."""

    RETAIN = "Retain"
    DELETE = "Delete"


class ImagePullPolicy(StrEnum):
    """When a node pulls the image; the values are those of Kubernetes."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class NetworkIsolation(StrEnum):
    """Traffic of a run's pods that a NetworkPolicy allows."""

    DISABLED = "Disabled"
    """No policy is made."""
    DENY_INGRESS = "DenyIngress"
    """In: calls from the run's own pods and the operator; scrapes of the metrics from the run's own
    namespace and those in the chart's `runs.monitoringNamespaces`. Out: all."""
    DENY_ALL = "DenyAll"
    """In: as above. Out: to the run's own pods and DNS only; models must come from a volume."""


class Pods(Section):
    """Settings common to all pods of the run."""

    image_pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    """When a node pulls the images: `Always`, `IfNotPresent` or `Never`."""
    service_account_name: ObjectName | None = None
    """ServiceAccount of the pods. If unset, the operator makes one for the run that has no
    rights."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods. If unset, the cluster's default."""
    queue_name: ObjectName | None = None
    """Kueue LocalQueue that admits the pods. If unset, Kueue is not used. Immutable."""
    token_secret_name: ObjectName | None = None
    """Secret with the shared token of learner, workers and operator, under the key `token`. If
    unset, the operator makes one for this run."""
    network_isolation: NetworkIsolation = NetworkIsolation.DENY_INGRESS
    """Traffic that a NetworkPolicy allows the run's pods. `Disabled`: all, without a policy.
    `DenyIngress`: in, only from the run's own pods, the operator, and scrapers in allowed
    namespaces; out, all. `DenyAll`: in, the same; out, only to the run's own pods and DNS, so
    models must come from a volume."""
    disruption_budgets: bool = True
    """Whether PodDisruptionBudgets are made, so that a node drain stops few workers at a time."""
    pod_monitor: bool = False
    """Whether a PodMonitor is made. It needs the Prometheus operator in the cluster."""
