"""Defaults that depend on the machine: number formats and engines of what computes on a GPU.

```
unset field               on a CPU     on a GPU
learner.precision         float32      bfloat16
rollouts[].precision      float32      bfloat16
rollouts[].engine         hf           vllm where it is installed, else hf
```
The host of a run sets them before it writes the file that the processes read, because learner and
workers must agree: on one machine from the GPUs that it has, in a cluster from those that the pods
ask for (`GpuUse.from_spec`). How much a micro-batch holds is left to the learner, which sees the
memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from vcpo.api.run import MAX_VLLM_TEMPERATURE, VCPORunSpec
from vcpo.api.workloads import EngineName, Precision, RolloutGroup

_OF_NETWORKS: Final = (
    "rdma/",
    "nvidia.com/hostdev",
    "vpc.amazonaws.com/",
    "networking.gke.io",
    "openshift.io/",
)
"""How the names of devices begin that are network adapters."""
_LARGE_BILLIONS: Final = 0.5
"""A model of this size takes minutes for a step on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """Which parts of a run compute on GPUs."""

    learner: bool
    groups: frozenset[str]
    """Names of the rollout groups whose workers do."""
    has_vllm: bool
    """Whether workers can use the vLLM that is built for GPUs."""

    @classmethod
    def of_machine(cls, spec: VCPORunSpec, *, has_gpus: bool, has_vllm: bool) -> Self:
        names = frozenset(group.name for group in spec.rollouts)
        return cls(learner=has_gpus, groups=names if has_gpus else frozenset(), has_vllm=has_vllm)

    @classmethod
    def from_spec(cls, spec: VCPORunSpec) -> Self:
        """Return what the pods ask for: by fields, or in the template by resources or claims.

        A pod on a GPU that it did not ask for counts as one on a CPU. The workers' image for GPUs
        has vLLM.
        """
        return cls(
            learner=_learner_asks(spec),
            groups=frozenset(group.name for group in spec.rollouts if _group_asks(spec, group)),
            has_vllm=True,
        )


def with_gpu_defaults(spec: VCPORunSpec, use: GpuUse) -> VCPORunSpec:
    """Return a spec whose unset number formats and engines are those of its hardware."""
    groups = tuple(
        group.model_copy(
            update={
                "precision": group.precision or _precision(on_gpu=group.name in use.groups),
                "engine": group.engine or _engine(spec, group, use),
            }
        )
        for group in spec.rollouts
    )
    own = spec.learner.precision or _precision(on_gpu=use.learner)
    learner = spec.learner.model_copy(update={"precision": own})
    return spec.model_copy(update={"learner": learner, "rollouts": groups})


def gpu_warnings(spec: VCPORunSpec, use: GpuUse) -> Iterator[str]:
    """Yield what is slow on these GPUs, in sentences that begin with the field."""
    slow = "'float32' on a GPU takes several times as long as 'bfloat16', the default there"
    if use.learner and spec.learner.precision is Precision.FLOAT32:
        yield f"spec.learner.precision: {slow}"
    for index, group in enumerate(spec.rollouts):
        field = f"spec.rollouts[{index}]"
        if group.name not in use.groups:
            continue
        if group.precision is Precision.FLOAT32:
            yield f"{field}.precision: {slow}"
        if group.engine is None and not use.has_vllm and not _is_too_hot(spec):
            yield (
                f"{field}.engine: 'hf' is used, because vLLM for GPUs is not installed here, and"
                " is many times slower; pip install 'vcpo[rollout]' installs vLLM"
            )


def missing_gpus(spec: VCPORunSpec) -> Iterator[str]:
    """Yield which pods ask a cluster for no GPU and need one, in sentences with the fix."""
    learner, is_asked = spec.learner, _learner_asks(spec)
    asks = {group.name: _group_asks(spec, group) for group in spec.rollouts}
    is_large = (spec.model.size_billions or 0.0) >= _LARGE_BILLIONS
    why = "the model is large" if is_large else "other pods of the run ask for one"
    is_wanted = is_large or is_asked or any(asks.values())
    cause = _need(learner.precision) or (why if is_wanted else "")
    if cause and not is_asked:
        yield f"The learner asks for no GPU, and {cause}: set `learner.gpusPerReplica`."
    for index, group in enumerate(spec.rollouts):
        cause = _need(group.precision, group.engine_name) or (why if is_wanted else "")
        if cause and not asks[group.name]:
            field = f"rollouts[{index}].gpus"
            yield f"Workers of group '{group.name}' ask for no GPU, and {cause}: set `{field}`."


def asks_for_accelerators(resources: Mapping[str, Any]) -> bool:
    """Whether resources name GPUs or the like: by a name with a domain, or by a claim."""
    parts = (resources.get(part) for part in ("requests", "limits"))
    names = (
        str(name)
        for part in parts
        if isinstance(part, Mapping)
        for name, amount in part.items()
        if str(amount) != "0"
    )
    is_named = any("/" in name and not name.startswith(_OF_NETWORKS) for name in names)
    return is_named or bool(resources.get("claims"))


def _need(precision: Precision | None, engine: str = "") -> str:
    if engine == EngineName.VLLM:
        return "its engine 'vllm' is for GPUs"
    return "its precision 'bfloat16' is for GPUs" if precision is Precision.BFLOAT16 else ""


def _precision(*, on_gpu: bool) -> Precision:
    return Precision.BFLOAT16 if on_gpu else Precision.FLOAT32


def _engine(spec: VCPORunSpec, group: RolloutGroup, use: GpuUse) -> str:
    if group.name in use.groups and use.has_vllm and not _is_too_hot(spec):
        return EngineName.VLLM.value
    return group.engine_name


def _is_too_hot(spec: VCPORunSpec) -> bool:
    return max(spec.sampling.temperature, spec.evaluation.temperature) > MAX_VLLM_TEMPERATURE


def _learner_asks(spec: VCPORunSpec) -> bool:
    templates = (spec.pods.template, spec.learner.template)
    return bool(spec.learner.gpus_per_replica) or any(_asks(each, "learner") for each in templates)


def _group_asks(spec: VCPORunSpec, group: RolloutGroup) -> bool:
    templates = (spec.pods.template, group.template)
    return bool(group.gpus_asked) or any(_asks(each, "rollout") for each in templates)


def _asks(template: Mapping[str, Any], container: str) -> bool:
    """Return whether a container of a pod template asks for a GPU, or claims a device.

    What cannot be merged into a pod asks for nothing; it is refused elsewhere.
    """
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    for each in containers if isinstance(containers, list) else ():
        if isinstance(each, Mapping) and each.get("name") == container:
            resources = each.get("resources")
            return isinstance(resources, Mapping) and asks_for_accelerators(resources)
    return False
