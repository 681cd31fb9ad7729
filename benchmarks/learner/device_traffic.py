"""What a step with exact norms asks of a GPU, counted without one.

The product's layers, taps, measurement and head run on tensors without numbers: 1.5 B parameters, 8
trajectories of 2,048 tokens, in bfloat16, with activation checkpoints. Two layers less one are a
layer, and there are 28.

    layer_gigabytes   read and written by all operations but products of matrices
    launches          of layers: operations that compute something; a fused function is one
    head_gigabytes    of the output head, which scores all tokens
    kept_bytes        of a token in a layer that is not checkpointed

    python -m benchmarks.learner.device_traffic

The last line printed is JSON. Aims: at most 380 GB and 3,900 launches, and 100 GB of the head.
"""

import json
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
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
from vcpo_learner.output_head.logit_tiles import LogitForm
from vcpo_learner.output_head.tiled_head import HeadRequest, apply_head
from vcpo_learner.output_head.trajectory_gradients import (
    GradientSums,
    TrajectoryGradients,
    TrajectoryWeights,
)
from vcpo_learner.per_sample_gradients import layer_gradients
from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.slot_sums import ParameterSums
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import record_calls
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum

_ROWS, _TOKENS = 8, 2048


def step(num_layers: int, setting: str = "layers") -> tuple[Count, int]:
    """Count what a step of a model of some layers asks for, and the bytes that it keeps."""
    count, fake = Count(), FakeTensorMode(allow_non_fake_inputs=True)
    kept: dict[int, Any] = {}
    with fake:
        model = make_model(QWEN_1_5B._replace(layers=num_layers), torch.device("cpu"))
        model.get_input_embeddings().requires_grad_(requires_grad=False)
    set_checkpoints(model, ActivationCheckpointing(setting))
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
        keep = saved_tensors_hooks(lambda each: kept.setdefault(id(each), each), lambda each: each)
        with keep, record_calls(slots) as recording, torch.autocast("cpu", torch.bfloat16):
            tokens = torch.zeros(_ROWS, _TOKENS, dtype=torch.int64)
            objectives = model.model(input_ids=tokens, **numbers)[0].sum(dim=(1, 2))
        measure_gradients(objectives, recording, weighted_sum).add_to_parameters([0.1])
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in kept.values()}
    return count, sum(each.nbytes() for each in storages.values())


def head() -> Count:
    """Count what the output head of a step asks for."""
    count, ones = Count(), [1.0] * _ROWS
    is_busy = patch.object(TrajectoryGradients, "_busy", lambda *_: [True] * _ROWS)
    with gpu_branches(), is_busy, FakeTensorMode(), count:
        weight, weighted, total = torch.empty(3, QWEN_1_5B.vocabulary, QWEN_1_5B.hidden)
        sums = GradientSums(weighted=weighted, by_group=total[None])
        weights = TrajectoryWeights(offsets=ones, groups=[0] * _ROWS)
        measured = partial(TrajectoryGradients, weights=weights, matrix_sums=sums)
        given: dict[str, Any] = {"input_dtype": torch.bfloat16, "is_fused": True}
        given["observer"] = Mock(measure=lambda each: measured(each, [_TOKENS] * _ROWS).measure())
        given["observer"].recording.anchor = None
        targets = torch.zeros(_ROWS * _TOKENS, dtype=torch.int64)
        request = HeadRequest(targets=targets, form=LogitForm(), temperature=1.0, **given)
        hidden = torch.empty(_ROWS * _TOKENS, QWEN_1_5B.hidden, requires_grad=True)
        apply_head(hidden, weight, None, request).logprobs.sum().backward()
    return count


def main() -> None:
    """Print what all layers and the head ask for as JSON."""
    product_kernel.register_fake(wide_product)
    add_product_kernel.register_fake(lambda *_: None)
    (one, _), (two, _) = step(1), step(2)
    (_, less), (_, more) = step(1, "none"), step(2, "none")
    found = {
        "layer_gigabytes": round(QWEN_1_5B.layers * (two.num_bytes - one.num_bytes) / 1e9),
        "launches": QWEN_1_5B.layers * (two.kernels - one.kernels).total(),
        "head_gigabytes": round(head().num_bytes / 1e9),
        "kept_bytes": (more - less) // (_ROWS * _TOKENS),
    }
    print(json.dumps({"benchmark": "device_traffic", **found}))


if __name__ == "__main__":
    main()
