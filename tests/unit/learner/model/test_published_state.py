"""What a version publishes: all of the state at first, and then the elements whose bits differ."""

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.fixtures.learner.models import llama, with_buffers
from vcpo.api.workloads import Lora, Precision
from vcpo.wire.deltas import elements_of, write_changes
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.model.published_state import (
    PublishedState,
    changes_on_cpu,
    changes_on_device,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BFLOAT16, FLOAT32 = Precision.BFLOAT16, Precision.FLOAT32


def load(payload):
    return safetensors.torch.load(bytes(payload))


def test_a_tensor_shared_by_two_modules_is_published_once():
    tensors = load(PublishedState(llama(tied=True)).take(FLOAT32))
    assert EMBEDDING in tensors
    assert HEAD not in tensors


def test_persistent_buffers_are_published_and_keep_their_types():
    model = with_buffers(llama())
    layer = model.model.layers[1]
    found = load(PublishedState(model).take(BFLOAT16))
    buffers = {
        name: each for name, each in found.items() if name not in dict(model.named_parameters())
    }
    expected = {
        f"model.layers.1.{name}": getattr(layer, name) for name in ("bias", "table", "is_set")
    }
    assert buffers.keys() == expected.keys()
    for name, each in expected.items():
        assert (buffers[name].dtype, buffers[name].shape) == (each.dtype, each.shape)
        assert torch.equal(buffers[name], each)


def test_beside_adapters_the_buffers_of_the_base_model_stay_in_its_files():
    model = with_buffers(llama())
    add_adapters(model, Lora(rank=1))
    assert all(".lora_" in name for name in load(PublishedState(model).take(FLOAT32)))


@torch.no_grad()
def test_a_buffer_that_changes_is_a_delta_of_its_own_bits():
    model = with_buffers(llama())
    layer, state = model.model.layers[1], PublishedState(model)
    state.take(BFLOAT16)
    layer.bias[0] += 1e-7  # less than a rounding to bfloat16
    layer.table[1, 0] = 5
    layer.is_set.fill_(False)
    found = {
        name: (each.positions.tolist(), each.bits.dtype.itemsize, each.bits.tolist())
        for name, each in state.take(BFLOAT16).items()
        if each.positions.size
    }
    bits = layer.bias[:1].numpy().view(np.uint32).tolist()
    assert found == {
        "model.layers.1.bias": ([0], 4, bits),
        "model.layers.1.table": ([2], 8, [5]),
        "model.layers.1.is_set": ([0], 1, [0]),
    }


@torch.no_grad()
def test_the_elements_whose_rounded_bits_differ_are_all_that_changes():
    model = llama()
    parameters = PublishedState(model)
    parameters.take(BFLOAT16)
    weight = model.lm_head.weight.view(-1)
    weight[:3] = torch.tensor([1.0, 0.0, 7.0])
    parameters.take(BFLOAT16)  # nobody wrote these into the file, so they differ again
    weight[0] += 1e-6  # less than its rounding
    weight[1] = -0.0
    changes = {name: each for name, each in parameters.take(BFLOAT16).items() if each.bits.size}
    assert list(changes) == [HEAD]
    assert changes[HEAD].positions.tolist() == [0, 1, 2]
    assert changes[HEAD].bits.tolist() == [0x3F80, 0x8000, 0x40E0]


@pytest.mark.parametrize("precision", [BFLOAT16, FLOAT32])
@torch.no_grad()
def test_a_set_that_gets_the_changes_of_each_version_equals_the_parameters(precision):
    torch.manual_seed(0)
    model = llama(tied=True)
    parameters = PublishedState(model)
    published = parameters.take(precision)
    for _ in range(3):
        for each in model.parameters():
            each.add_((torch.rand_like(each) < 0.05) * torch.randn_like(each))
        changes = parameters.take(precision)
        num_changes = sum(change.positions.size for change in changes.values())
        assert 0 < num_changes < 0.1 * sum(each.numel() for each in model.parameters())
        write_changes(elements_of(published), changes)
        assert published == PublishedState(model).whole(precision)


@torch.no_grad()
def test_a_version_in_which_most_elements_differ_is_a_whole_file():
    model = llama()
    parameters = PublishedState(model)
    before = parameters.take(FLOAT32)
    for each in model.parameters():
        each.add_(1.0)
    after = parameters.take(FLOAT32)
    assert after == PublishedState(model).whole(FLOAT32)
    assert after is before  # whose memory it takes
    model.lm_head.weight[0, 0] = 5.0
    assert parameters.take(FLOAT32)[HEAD].positions.tolist() == [0]


@torch.no_grad()
def test_parameters_found_to_differ_before_the_file_is_given_up_are_in_the_new_one():
    model = llama()
    parameters = PublishedState(model)
    parameters.take(BFLOAT16)
    model.model.embed_tokens.weight[0] = 3.0  # a few of the first, then all of the others
    for name, each in model.named_parameters():
        if name != EMBEDDING:
            each.copy_(torch.randn_like(each) + 9.0)
    after = parameters.take(BFLOAT16)
    assert isinstance(after, bytearray)
    assert after == PublishedState(model).whole(BFLOAT16)


@torch.no_grad()
def test_another_number_format_is_a_new_file():
    model = llama()
    parameters = PublishedState(model)
    parameters.take(FLOAT32)
    assert load(parameters.take(BFLOAT16))[HEAD].dtype is torch.bfloat16
    assert all(not each.positions.size for each in parameters.take(BFLOAT16).values())


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", torch.int16), ("float32", torch.int32)])
def test_the_search_on_a_device_finds_what_the_one_in_tiles_finds(monkeypatch, dtype, bits):
    monkeypatch.setattr("vcpo_learner.model.published_state._TILE", 7)
    torch.manual_seed(0)
    before = torch.randn(50)
    now = torch.where(torch.rand(50) < 0.3, -before, before)
    was = before.to(getattr(torch, dtype)).view(bits)
    in_tiles = changes_on_cpu(now, was, getattr(torch, dtype))
    copy = was.clone()
    on_device = changes_on_device(now, copy, getattr(torch, dtype))
    assert in_tiles.positions.tolist() == (now != before).nonzero().flatten().tolist()
    assert on_device.positions.tolist() == in_tiles.positions.tolist()
    assert on_device.bits.tolist() == in_tiles.bits.tolist()
    assert torch.equal(copy, now.to(getattr(torch, dtype)).view(bits))
