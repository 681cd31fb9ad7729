"""What the decoder layers of a step with exact norms ask of a GPU, counted without one.

The product's layers, taps and measurement run on tensors without numbers: 1.5 B parameters, 8
trajectories of 2,048 tokens, in bfloat16, with activation checkpoints. Two layers less one are a
layer, and there are 28.

    layer_gigabytes   read and written by all operations but products of matrices
    launches          operations that compute something; a fused function is one

    python -m benchmarks.learner.device_traffic

The last line printed is JSON. Aims: at most 380 GB and 3,900 launches.
"""

import json
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from benchmarks.gpu.random_models import QWEN_1_5B, make_model
from benchmarks.learner.host_syncs import (
    Count,
    add_product_kernel,
    gpu_branches,
    product_kernel,
    wide_product,
)
from vcpo.api.learner import ActivationCheckpointing
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.forward.fused_layers import fuse_layers
from vcpo_learner.per_sample_gradients import layer_gradients
from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.slot_sums import ParameterSums
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import record_calls
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum

_ROWS, _TOKENS = 8, 2048


def step(num_layers: int) -> Count:
    """Count what a step of a model of some layers asks for."""
    count, fake = Count(), FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model = make_model(QWEN_1_5B._replace(layers=num_layers), torch.device("cpu"))
        model.get_input_embeddings().requires_grad_(requires_grad=False)
    set_checkpoints(model, ActivationCheckpointing.LAYERS)
    fuse_layers(model, is_half=False)
    slots, ones = Slots(model.model), torch.ones(_ROWS, dtype=torch.float64)
    with fake:
        sums = ParameterSums(slots, 1, keeps_factors=True)
    weighted_sum = WeightedSum(offsets=ones, groups=[0] * _ROWS, sums=sums)
    numbers = {"position_ids": torch.arange(_TOKENS).expand(_ROWS, -1), "use_cache": False}
    with (
        patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None),
        patch.object(layer_gradients, "_scales_each_feature", lambda *_: True),
        gpu_branches(),
        fake,
        count,
    ):
        with record_calls(slots) as recording, torch.autocast("cpu", torch.bfloat16):
            tokens = torch.zeros(_ROWS, _TOKENS, dtype=torch.int64)
            objectives = model.model(input_ids=tokens, **numbers)[0].sum(dim=(1, 2))
        measure_gradients(objectives, recording, weighted_sum).add_to_parameters([0.1])
    return count


def main() -> None:
    """Print what all layers ask for as JSON."""
    product_kernel.register_fake(wide_product)
    add_product_kernel.register_fake(lambda *_: None)
    one, two = step(1), step(2)
    found = {
        "layer_gigabytes": round(QWEN_1_5B.layers * (two.num_bytes - one.num_bytes) / 1e9),
        "launches": QWEN_1_5B.layers * (two.kernels - one.kernels).total(),
    }
    print(json.dumps({"benchmark": "device_traffic", **found}))


if __name__ == "__main__":
    main()
