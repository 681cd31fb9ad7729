"""Settings that only a cluster uses: images, scheduling, isolation, volumes."""

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from vcpo.api.fields import FINITE, DnsLabel, DnsSubdomain, Section, conflict, refuse

PodTemplate = Annotated[dict[str, Any], Field(json_schema_extra={"type": "object"}), FINITE]
"""Part of a Kubernetes PodTemplateSpec (`metadata` and `spec`), merged over the operator's."""

Image = Annotated[str, Field(min_length=1, max_length=512)]
"""Reference of a container image."""

DrainSeconds = Annotated[int, Field(ge=1, le=3600)]
"""Time for a graceful shutdown, in seconds, at most one hour."""

ObjectName = Annotated[DnsSubdomain, Field(min_length=1)]
"""Name of an object of the cluster."""

ResourceName = Annotated[
    str, Field(max_length=253, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
]
"""Name of an extended resource of Kubernetes, such as `nvidia.com/gpu`."""


class StorageRetention(StrEnum):
    """Whether a run's volume outlives the run."""

    RETAIN = "Retain"
    DELETE = "Delete"


class UpgradePolicy(StrEnum):
    """When a run's pods become those of an upgraded operator."""

    RECREATE = "Recreate"
    """At once."""
    ON_RESTART = "OnRestart"
    """When the learner starts again for another reason."""
    NEVER = "Never"
    """When an edit of the run replaces them."""


class NetworkIsolation(StrEnum):
    """Traffic of a run's pods that a NetworkPolicy allows."""

    DISABLED = "Disabled"
    """No policy is made."""
    DENY_INGRESS = "DenyIngress"
    """The run's own pods and the operator may call, and the run's own namespace and the chart's
    `runs.monitoringNamespaces` may scrape. The pods may connect anywhere."""
    DENY_ALL = "DenyAll"
    """The same may call and scrape. The pods may connect to the run's own pods, DNS and
    `extraEgress` only, so models must come from a volume."""


class Transport(StrEnum):
    """How the calls between a run's pods and the operator travel."""

    TLS = "Tls"
    """Encrypted; a caller checks whom it calls."""
    PLAIN_TEXT = "PlainText"
    """Nothing is encrypted, keys included: for a network that encrypts already, such as a service
    mesh."""


class Egress(Section):
    """A destination that pods may connect to under `DenyAll`."""

    port: Annotated[int, Field(ge=1, le=65_535)]
    """TCP port of the destination, such as 443."""
    cidr: Annotated[str, Field(max_length=64, pattern=r"^[0-9A-Fa-f.:]+/[0-9]{1,3}$")] | None = None
    """Addresses of the destination, such as `10.0.0.0/8`. If unset, `namespace` says where it is;
    without both, any address."""
    namespace: DnsLabel | None = None
    """Namespace of the cluster whose pods are the destination. If unset, `cidr` says where it
    is."""

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if self.cidr is not None and self.namespace is not None:
            message = "may not be given beside `namespace`; write two destinations"
            refuse([conflict("cidr", value=self.cidr, message=message)])
        return self


class Pods(Section):
    """Settings common to all pods of the run."""

    image_pull_secrets: Annotated[tuple[ObjectName, ...], Field(max_length=16)] = ()
    """Secrets with which nodes pull the images from a private registry. If empty, the operator's
    default."""
    gpu_resource_name: ResourceName | None = None
    """Name under which nodes offer the GPUs that `gpusPerReplica` and `gpus` ask for, such as
    `amd.com/gpu` or `nvidia.com/mig-3g.40gb`. If unset, the operator's default."""
    token_secret_name: ObjectName | None = None
    """Secret with the token of the Hugging Face hub, under `token`, for models and data that need
    one. If unset, none."""
    template: PodTemplate = Field(default={})
    """Part of a PodTemplateSpec, merged into all pods of the run; that of the learner or the group
    goes over it. Containers are named `learner` and `rollout`; each pod takes its own. Use it for
    node selection, tolerations, variables and volumes."""
    queue_name: ObjectName | None = None
    """Kueue LocalQueue that admits the pods: those of the learner, and of each group whose
    `minReplicas` is its `maxReplicas`, as one unit; those of other groups one by one. If unset,
    Kueue is not used. Immutable."""
    keys_secret_name: ObjectName | None = None
    """Secret with the keys by which the run's processes know each other: `worker` of the workers at
    the learner, `steering` of the operator at the learner; two random texts. If unset, the operator
    makes one for this run."""
    transport: Transport = Transport.TLS
    """How calls travel: `Tls`, or `PlainText` where the network encrypts already, such as a service
    mesh. With `PlainText` whoever can read the network can read the keys of the run."""
    tls_secret_name: ObjectName | None = None
    """Secret with the certificates of learner and workers, under `ca.crt`, `tls.crt` and `tls.key`
    as cert-manager writes them. They must be valid for `<run>-learner`,
    `<run>-learner.<namespace>.svc` and `<run>-rollout`. Every worker then
    holds the learner's private key. If unset, the operator makes an authority for this run, a
    certificate for each role, and renews them."""
    network_isolation: NetworkIsolation = NetworkIsolation.DENY_INGRESS
    """Traffic of the run's pods that a NetworkPolicy allows. `Disabled` makes no policy.
    `DenyIngress` lets only the run's own pods, the operator, and scrapers in allowed namespaces
    connect to the pods, which may connect anywhere. `DenyAll` lets the same connect to them, and
    lets them connect only to the run's own pods, DNS and `extraEgress`, so models must come from a
    volume."""
    extra_egress: Annotated[tuple[Egress, ...], Field(max_length=16)] = ()
    """Further destinations that the pods may connect to under `DenyAll`, such as a tracking service
    or a collector of traces."""
    pod_monitor: bool = False
    """If true, a PodMonitor is made. It needs the Prometheus operator in the cluster."""

    @model_validator(mode="after")
    def _certificates_are_used(self) -> Self:
        if self.tls_secret_name is not None and self.transport is Transport.PLAIN_TEXT:
            message = "may not be given with `transport` `PlainText`; leave one of them out"
            refuse([conflict("tls_secret_name", value=self.tls_secret_name, message=message)])
        return self
