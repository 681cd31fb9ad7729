"""LoRA adapters of the models of `tiny_vllm`, and the model that a version of them stands for."""

import copy

import safetensors.torch
import torch

from vcpo.api.workloads import Lora
from vcpo_rollout.engines.engine import PolicyWeights

LAYERS = (
    # Of fused q, k and v, two have an adapter; of gate and up, one.
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.v_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.mlp.down_proj",
)
LORA = Lora(rank=3, alpha=6, targetModules=[each.rpartition(".")[2] for each in LAYERS])


def make_adapters(base, *, seed, size=0.2):
    """A and B of some layers, both random, under the names of the learner."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in LAYERS:
        rows, columns = base.get_parameter(f"{layer}.weight").shape
        shapes = {"A": (LORA.rank, columns), "B": (rows, LORA.rank)}
        for half, shape in shapes.items():
            tensors[f"{layer}.lora_{half}.default.weight"] = size * torch.randn(
                shape, generator=generator
            )
    return tensors


def version_of(tensors, policy_version):
    return PolicyWeights(policy_version, safetensors.torch.save(tensors))


@torch.no_grad()
def adapted(base, tensors):
    """The model that a version stands for: W + 6/3 B A."""
    model = copy.deepcopy(base)
    for layer in LAYERS:
        a, b = (tensors[f"{layer}.lora_{half}.default.weight"] for half in "AB")
        model.get_parameter(f"{layer}.weight").add_(2.0 * (b @ a))
    return model
