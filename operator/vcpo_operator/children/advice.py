"""What a user should know about the pods of a valid run, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vcpo.api import VCPORunSpec
from vcpo.api.workloads import EngineName
from vcpo_operator.children.manifest import Child, Kind, Manifest
from vcpo_operator.children.pod_template.resources import asks_for_devices
from vcpo_operator.names import GROUP_LABEL, ROLE_LABEL, Role

_LARGE_BILLIONS = 0.5
"""A model of this size takes minutes for a step on a CPU."""


def pod_notes(spec: VCPORunSpec, children: Iterable[Child]) -> Iterator[str]:
    """Yield which pods ask for no GPU though they need one, with the cure."""
    asks = {}
    for child in children:
        if child.kind in {Kind.STATEFUL_SET, Kind.DEPLOYMENT}:
            labels = child.manifest["metadata"]["labels"]
            group = labels.get(GROUP_LABEL)
            asks[group] = asks_for_devices(_resources(child.manifest, labels[ROLE_LABEL]))
    is_large = (spec.model.size_billions or 0.0) >= _LARGE_BILLIONS
    why = "the model is large" if is_large else "other pods of the run ask for one"
    if asks.get(None) is False and (is_large or any(asks.values())):
        yield f"The learner asks for no GPU, and {why}: set `learner.gpusPerReplica`."
    for index, group in enumerate(spec.rollouts):
        is_fast = group.engine_name == EngineName.VLLM
        if asks.get(group.name) is False and (is_large or is_fast or any(asks.values())):
            cause = "its engine 'vllm' is for GPUs" if is_fast else why
            field = f"rollouts[{index}].gpus"
            yield f"Workers of group '{group.name}' ask for no GPU, and {cause}: set `{field}`."


def _resources(workload: Manifest, role: str) -> Manifest:
    containers = workload["spec"]["template"]["spec"]["containers"]
    own: Manifest = next(each for each in containers if each["name"] == Role(role).value)
    resources: Manifest = own["resources"]
    return resources
