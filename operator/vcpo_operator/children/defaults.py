"""The operator's own settings, as the builders of a run's objects take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vcpo_operator.children.network import IngressSources


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDefaults:
    """The operator's own settings, for all of its runs."""

    learner_image: str
    """Image of learners whose run names none."""
    rollout_image: str
    """Image of rollout workers whose group names none."""
    ingress_sources: IngressSources = field(default_factory=IngressSources)
    """The pods and namespaces that may connect to runs, by their network policies."""
    scrape_annotations: bool = True
    """Whether pods carry the annotations by which a Prometheus without its operator finds them."""
    shared_pod_monitor: bool = False
    """Whether a PodMonitor of the chart selects the pods of all runs already."""
    gpu_resource_name: str = "nvidia.com/gpu"
    """Name under which nodes offer GPUs, for runs that name none."""
    image_pull_secrets: Sequence[str] = ()
    """Secrets with which nodes pull the images, for runs that name none."""
    pod_environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every learner and worker; a template of the run may change them."""
