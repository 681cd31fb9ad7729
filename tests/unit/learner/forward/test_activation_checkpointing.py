"""Layers that are computed twice give the numbers of layers that are computed once."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fixtures.learner.models import EVERY_FAMILY, PAD, llama, sampled_groups, seeded_model
from tests.fixtures.learner.norms import recorded_norms
from tests.fixtures.learner.updates import make_spec
from vcpo.api.learner import ActivationCheckpointing
from vcpo.api.workloads import Lora
from vcpo_learner.forward.activation_checkpointing import (
    are_checkpointed,
    decoder_layers,
    set_checkpoints,
)
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import LostGradientError, record_calls
from vcpo_learner.update.gradient import GradientAccumulation
from vcpo_learner.update.policy_update import PolicyUpdate

AUTO, NONE, LAYERS = ActivationCheckpointing


def adapted():
    model = llama()
    add_adapters(model, Lora(rank=2, alpha=4))
    return model


MODELS = {**EVERY_FAMILY, "adapters": adapted}
INNER_WIDTH = 24
"""Of the activations within a layer of `llama`; no other tensor of a forward pass has it."""


def norms_and_gradient(model, setting, **algorithm):
    set_checkpoints(model, setting)
    spec = make_spec(**algorithm)
    accumulation = GradientAccumulation(model, spec, PAD)
    batch = accumulation.score(sampled_groups(model), policy_version=0)
    assert (batch.graph is not None) is (not batch.is_accumulated)
    if not batch.is_accumulated:
        accumulation.accumulate(batch, [1.0, -1.0, 0.5, 0.0] * 3)
    trained = [each for each in model.parameters() if each.requires_grad]
    return batch.summary.squared_norms, torch.cat([each.grad.flatten() for each in trained])


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"method": "grpo", "baseline": None, "settings": {}}],
    ids=["one pass", "two passes"],
)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_norms_and_gradient_are_those_without_checkpoints(make, algorithm):
    expected = norms_and_gradient(seeded_model(make), NONE, **algorithm)
    found = norms_and_gradient(seeded_model(make), LAYERS, **algorithm)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-9)


def test_a_graph_that_is_gone_through_twice_is_computed_again_twice():
    # OPOB measures the norms before M2PO's clip can see the batch; the second pass keeps the graph.
    algorithm = {"method": "m2po"}
    expected = norms_and_gradient(seeded_model(llama), NONE, **algorithm)
    found = norms_and_gradient(seeded_model(llama), LAYERS, **algorithm)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-9)


def test_each_layer_is_run_twice_with_gradients_and_once_without():
    model = seeded_model(llama)
    runs = Counter()
    for number, layer in enumerate(decoder_layers(model)):
        layer.input_layernorm.register_forward_hook(lambda *_, number=number: runs.update([number]))
    set_checkpoints(model, LAYERS)
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        model(tokens)
    assert runs == {0: 1, 1: 1}
    model(tokens).logits.sum().backward()
    assert runs == {0: 3, 1: 3}


@pytest.mark.parametrize(("setting", "is_held"), [(NONE, True), (LAYERS, False)])
def test_a_recorded_forward_pass_holds_no_activation_that_is_computed_again(setting, is_held):
    model = seeded_model(llama)
    set_checkpoints(model, setting)
    widths = set()

    def hold(tensor):
        widths.add(tensor.shape[-1] if tensor.ndim == 3 else 0)
        return tensor

    slots = Slots(model)
    with saved_tensors_hooks(hold, lambda tensor: tensor), record_calls(slots) as recording:
        model(torch.tensor([[3, 4, 5]]))
    # What a layer calls is on record when it has run again.
    assert len(recording.sites) == (2 * 9 + 3 if is_held else 3)
    assert (INNER_WIDTH in widths) is is_held


def test_a_recording_holds_no_tensor_itself():
    model = seeded_model(llama)
    with record_calls(Slots(model)) as recording:
        model(torch.tensor([[3, 4, 5]]))
    held = [each for site in recording.sites for each in site.arguments.values()]
    assert not any(isinstance(each, torch.Tensor) for each in held)


def test_a_checkpoint_that_does_not_know_the_recording_is_an_error_and_no_wrong_number():
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

        def forward(self, inputs):
            return checkpoint(self.inner, inputs, use_reentrant=False)

    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint"):
        recorded_norms(Foreign(), torch.randn(4, 5, 3))


def test_a_weight_that_a_layer_uses_past_its_module_is_named():
    model = seeded_model(llama)
    layer = decoder_layers(model)[1]
    layer.extra = nn.Linear(16, 16, bias=False)
    layer.mlp.forward = lambda states: nn.functional.linear(states, layer.extra.weight)
    set_checkpoints(model, LAYERS)
    with record_calls(Slots(model)) as recording:
        logits = model(torch.tensor([[3, 4, 5], [4, 5, 6]])).logits
    with pytest.raises(LostGradientError, match=r"layers\.1\.extra\.weight"):
        measure_gradients(logits.sum(dim=(1, 2)), recording)


def test_an_input_that_a_layer_changes_in_place_is_named():
    model = seeded_model(llama)
    mlp = decoder_layers(model)[1].mlp
    mlp.forward = lambda states: mlp.down_proj(mlp.up_proj(states)) + states.mul_(2.0)
    set_checkpoints(model, LAYERS)
    with record_calls(Slots(model)) as recording:
        logits = model(torch.tensor([[3, 4, 5], [4, 5, 6]])).logits
    with pytest.raises(ValueError, match="had its input changed in place"):
        measure_gradients(logits.sum(dim=(1, 2)), recording)


def test_a_cache_that_a_model_makes_itself_takes_no_gradient_away():
    # transformers' default; the keys of the first run would be found in the second.
    gradients = []
    for setting in (NONE, LAYERS):
        model = seeded_model(llama)
        set_checkpoints(model, setting)
        model(torch.tensor([[3, 4, 5]]), use_cache=True).logits.square().sum().backward()
        gradients.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_first_run_under_autocast_leaves_no_weight_without_a_gradient(is_recorded):
    found = []
    for setting in (NONE, LAYERS):
        model = seeded_model(llama)
        set_checkpoints(model, setting)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with record_calls(Slots(model)) if is_recorded else nullcontext():
                logits = model(torch.tensor([[3, 4, 5], [4, 5, 6]]), use_cache=False).logits
            logits.square().sum().backward()
        found.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(("num_layers", "is_on"), [(1, False), (19, True)])
def test_auto_saves_memory_from_one_billion_parameters_on(num_layers, is_on):
    # A layer has 4 x 2,048 x 2,048 + 3 x 2,048 x 6,000 and some more: 53.6 million.
    config = LlamaConfig(hidden_size=2048, intermediate_size=6000, num_hidden_layers=num_layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    set_checkpoints(model, AUTO)
    assert are_checkpointed(model) is is_on


def test_the_spec_of_a_run_decides():
    model = seeded_model(llama)
    spec = make_spec()
    learner = spec.learner.model_copy(update={"activation_checkpointing": LAYERS})
    PolicyUpdate(model, spec.model_copy(update={"learner": learner}), PAD)
    assert all("forward" in vars(layer) for layer in decoder_layers(model))


@pytest.mark.parametrize(("free_gib", "is_on"), [(1, True), (64, False)])
def test_the_memory_of_a_gpu_decides_where_the_spec_leaves_it_open(free_gib, is_on, monkeypatch):
    monkeypatch.setattr("vcpo_learner.schedule.token_budget.free_bytes", lambda _: free_gib << 30)
    model = seeded_model(llama)
    PolicyUpdate(model, make_spec(), PAD)
    assert are_checkpointed(model) is is_on
