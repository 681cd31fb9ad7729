"""What only a cluster needs: images, scheduling, isolation, volumes. A local run ignores it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from vcpo.spec.fields import DnsSubdomain, Section

PodTemplate = Annotated[dict[str, Any], Field(json_schema_extra={"type": "object"})]
"""Part of a Kubernetes PodTemplateSpec, merged over ours: `metadata` and `spec`."""

Image = Annotated[str, Field(min_length=1, max_length=512)]
"""Reference of a container image."""

DrainSeconds = Annotated[int, Field(ge=1, le=3600)]
"""Time to leave in good order, in seconds, at most one hour."""

ObjectName = Annotated[DnsSubdomain, Field(min_length=1)]
"""Name of an object of the cluster."""


class Scaling(StrEnum):
    """Who sets the number of workers of a group."""

    DIRECT = "Direct"
    """The operator, from the learner's signals."""
    EXTERNAL = "External"
    """An autoscaler or a person, on the group's VCPORolloutScaler; the operator follows it."""


class StorageRetention(StrEnum):
    """What happens to a run's volume when the run is deleted."""

    RETAIN = "Retain"
    DELETE = "Delete"


class ImagePullPolicy(StrEnum):
    """When a node pulls the image, in the words of Kubernetes."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class NetworkIsolation(StrEnum):
    """Which traffic of a run's pods a NetworkPolicy lets through."""

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
    """When a node pulls the images."""
    service_account_name: ObjectName | None = None
    """ServiceAccount of the pods; None makes one for the run that may do nothing."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods; None is the cluster's default."""
    queue_name: ObjectName | None = None
    """Kueue LocalQueue that admits the pods; None does without Kueue. Immutable."""
    token_secret_name: ObjectName | None = None
    """Secret with the token, under the key `token`, that learner, workers and operator show each
    other. None: the operator makes one for this run alone."""
    network_isolation: NetworkIsolation = NetworkIsolation.DENY_INGRESS
    """Which traffic is let through."""
    disruption_budgets: bool = True
    """Make PodDisruptionBudgets, so that node drains take few workers at a time."""
    pod_monitor: bool = False
    """Make a PodMonitor; needs the Prometheus operator's resources in the cluster."""
