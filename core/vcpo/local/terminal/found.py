"""What `vcpo validate` found of a run, beside its problems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vcpo.api import GpuUse, VCPORun, with_gpu_defaults
from vcpo.local.models import model_folder, num_parameters

_GIB: Final = 1 << 30
_LEARNER_BYTES: Final = 16
"""Of each trained parameter: the weight, its gradient and two means of AdamW, in float32."""


def found_lines(run: VCPORun, use: GpuUse) -> Iterator[str]:
    """Yield how a run with local paths would be carried out on this machine."""
    spec, batch = with_gpu_defaults(run.spec, use), run.spec.batch
    size = f"{batch.prompts_per_step} prompts x {batch.trajectories_per_prompt} responses"
    lag = f"lag at most {spec.algorithm.max_policy_lag_steps} versions"
    asked = f"{spec.steps * batch.prompts_per_step:,} prompts in all"
    yield f"steps     {spec.steps:,} of {size}: {asked}; {lag}"
    every = spec.evaluation.every_steps
    if every:
        yield f"held out  {spec.evaluation.prompts} prompts every {every} steps"
    for given, group in zip(run.spec.rollouts, spec.rollouts, strict=True):
        why = "as the file says" if given.engine else "vLLM for GPUs is not installed"
        if not given.engine and (use.has_vllm or group.name not in use.groups):
            why = "a GPU is here" if group.name in use.groups else "no GPU is here"
        engine = f"engine {group.engine} ({why}), {group.precision}"
        device = "GPU" if group.name in use.groups else "CPU"
        yield f"workers   {group.name}: {engine} on the {device}, up to {group.max_replicas}"
    yield f"learner   {spec.learner.precision} on the {'GPU' if use.learner else 'CPU'}"
    if (folder := model_folder(spec.model)) is not None and (count := num_parameters(folder)):
        learner = (4 if spec.model.lora else _LEARNER_BYTES) * count / _GIB
        needs = f"learner {learner:.2g} GiB, each worker {4 * count / _GIB:.2g} GiB"
        yield f"memory    {count / 1e6:,.3g} M parameters; at most {needs}, and activations"
