"""What goes to vLLM: the parameters of a request, and the tensors of a version."""

from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, WeightVersionSpan

from vcpo.wire.limits import MAX_ROUTE_BYTES
from vcpo.wire.packing import ExpertRoutes
from vcpo.wire.trajectory import PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import GenerationRequest
from vcpo_rollout.engines.seeds import token_seed
from vcpo_rollout.engines.vllm.exchange import (
    patches_to_send,
    sampling_params,
    to_generation,
    write_memory_file,
)


def test_changes_are_sent_as_positions_and_values_of_their_tensors():
    tensors = {"bias": torch.arange(3).bfloat16(), "weight": torch.arange(6.0).view(2, 3)}
    changed = {"bias": np.array([1]), "weight": np.array([0, 5])}
    with write_memory_file(patches_to_send(tensors, changed)) as file:
        found = safetensors.torch.load_file(f"/proc/self/fd/{file.fileno()}")
    assert {name: found[f"{name}:positions"].tolist() for name in tensors} == {
        "bias": [1],
        "weight": [0, 5],
    }
    for name, tensor in tensors.items():
        assert torch.equal(found[f"{name}:values"], tensor.view(-1)[changed[name]])


@pytest.mark.parametrize("tensor", [torch.arange(2), torch.tensor([1.0, torch.nan])])
def test_values_that_a_patch_cannot_hold_are_not_sent_as_one(tensor):
    assert patches_to_send({"x": tensor}, {"x": np.array([1])}) is None


def test_a_request_has_the_seed_of_its_first_new_token():
    request = GenerationRequest(prompt_token_ids=(3, 4), temperature=1.0, max_new_tokens=8, seed=11)
    partial = PartialResponse(
        token_ids=(5, 6, 7),
        logprobs=(-0.5,) * 3,
        version_spans=(VersionSpan(policy_version=0, num_tokens=3),),
    )
    assert sampling_params(request, frozenset()).seed == token_seed(11, 2)
    resumed = replace(request, partial_response=partial)
    assert sampling_params(resumed, frozenset()).seed == token_seed(11, 5)
    assert sampling_params(replace(request, seed=None), frozenset()).seed is None


def finished(routes):
    """Two tokens of version 3, as vLLM returns them."""
    return CompletionOutput(
        index=0,
        text="",
        token_ids=[5, 6],
        cumulative_logprob=None,
        logprobs=[{5: Logprob(-0.5)}, {6: Logprob(-1.0)}],
        finish_reason="length",
        routed_experts=routes,
        weight_versions=[WeightVersionSpan(start=0, end=2, version="3")],
    )


@pytest.mark.parametrize(
    ("keys_version", "ages"), [(None, (0, 0, 0)), (3, (0, 2, 0)), (1, (2, 4, 0)), (7, (0, 2, 0))]
)
def test_spans_say_how_old_the_keys_are_that_they_read(keys_version, ages):
    # Version 2 comes after 5: a learner began again, and what was kept is gone.
    spans = [
        WeightVersionSpan(start=at, end=at + 1, version=str(version))
        for at, version in enumerate((3, 5, 2 if keys_version != 1 else 1))
    ]
    output = replace(
        finished(None), token_ids=[5, 6, 5], logprobs=[{5: Logprob(-1.0), 6: Logprob(-1.0)}] * 3
    )
    output.weight_versions = spans
    found = to_generation(output, None, keys_version=keys_version).version_spans
    assert tuple(span.key_age_versions for span in found) == ages


@pytest.mark.parametrize(("dtype", "is_wide"), [(np.uint8, False), (np.uint16, True)])
def test_routes_are_taken_as_vllm_returns_them(dtype, is_wide):
    # Three tokens, two layers, one choice; vLLM returns routes of the prompt too.
    numbers = np.array([[[1], [2]], [[3], [0]], [[2], [1]]], dtype=dtype)
    assert to_generation(finished(numbers), None).expert_routes == ExpertRoutes(
        experts=numbers.tobytes(), num_layers=2, num_choices=1, is_wide=is_wide
    )


def test_without_routes_a_response_has_none_and_of_too_many_it_has_the_first():
    for routes in (None, np.zeros((0, 3, 2), dtype=np.uint8)):
        assert to_generation(finished(routes), None).expert_routes is None
    too_many = np.zeros((MAX_ROUTE_BYTES, 3, 2), dtype=np.uint16)
    routes = to_generation(finished(too_many), None).expert_routes
    assert routes.num_tokens == MAX_ROUTE_BYTES // 12
