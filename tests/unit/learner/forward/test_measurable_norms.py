"""Models whose gradient norms cannot be measured are refused before the first step."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.fixtures.learner.models import (
    EVERY_FAMILY,
    HYBRIDS,
    MIXTURE_SIZES,
    MIXTURES,
    PAD,
    llama,
    qwen2,
    sampled_groups,
    seeded_model,
)
from tests.fixtures.learner.updates import make_spec
from vcpo.api.learner import ActivationCheckpointing, Attention
from vcpo.api.workloads import Lora
from vcpo.service.lifecycle import StartError
from vcpo_learner.forward import measurable_norms
from vcpo_learner.forward.activation_checkpointing import (
    are_checkpointed,
    decoder_layers,
    set_checkpoints,
)
from vcpo_learner.forward.attention import select_attention
from vcpo_learner.forward.fused_layers import fuse_layers, fused_parts
from vcpo_learner.forward.measurable_norms import require_measurable_norms
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.twin import make_twin
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.output_head.trajectory_gradients import TrajectoryGradients
from vcpo_learner.per_sample_gradients import layer_gradients
from vcpo_learner.per_sample_gradients.mixtures import is_experts
from vcpo_learner.update.policy_update import PolicyUpdate


def gpt_oss():
    return GptOssForCausalLM(GptOssConfig(**MIXTURE_SIZES, head_dim=8, num_local_experts=4))


def test_layers_that_see_no_whole_trajectory_are_named_at_the_start():
    reason = r"module 'model.layers.0.self_attn' \(GptOssAttention\) returned"
    with pytest.raises(StartError, match=rf"cannot be measured \({reason}"):
        require_measurable_norms(seeded_model(gpt_oss), packs=False)


def test_norms_of_a_mixer_are_compared_beyond_its_first_chunk(monkeypatch):
    own = layer_gradients.convolution_gradients

    def short(inputs, gradients, size):
        return own(inputs[:, :64], gradients[:, :64], size)

    monkeypatch.setattr(layer_gradients, "convolution_gradients", short)
    with pytest.raises(StartError, match="differ from autograd's by a share"):
        require_measurable_norms(seeded_model(HYBRIDS["lfm2"]), packs=False)


@pytest.mark.parametrize("make", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.filterwarnings("ignore:The following .* keys did not match")
def test_adapters_beside_experts_take_their_step(make):
    model = seeded_model(make)
    add_adapters(model, Lora.model_validate({"rank": 2, "targetModules": ["q_proj", "v_proj"]}))
    update = PolicyUpdate(model, make_spec(), PAD)
    assert update.step(sampled_groups(model), policy_version=9).skipped is None


def mixture(name):
    sizes = {**MIXTURE_SIZES, "moe_intermediate_size": 8, "num_experts": 4, "num_local_experts": 4}
    shared = {"shared_expert_intermediate_size": 8, "n_shared_experts": 1, "moe_num_experts": 4}
    groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    config = getattr(transformers, f"{name}Config")(**sizes, **shared, **groups, head_dim=8)
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("name", ["Olmoe", "Qwen2Moe", "Glm4Moe", "GraniteMoe", "Phimoe", "Dots1"])
def test_mixtures_of_other_families_are_accepted(name):
    model = seeded_model(lambda: mixture(name))
    assert any(is_experts(each) for each in model.modules())
    require_measurable_norms(model, packs=True)


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", EVERY_FAMILY | HYBRIDS)
def test_models_are_accepted_and_left_as_they_are(family, packs):
    model = seeded_model((EVERY_FAMILY | HYBRIDS)[family])
    select_attention(model, Attention.AUTO, packs=packs)
    before = {name: each.clone() for name, each in model.named_parameters()}
    require_measurable_norms(model, packs=packs)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


class Bypassing(nn.Module):
    """Uses the weight of one of its modules a second time, outside of that module."""

    def __init__(self):
        super().__init__()
        self.model = seeded_model(llama)

    def forward(self, **inputs):
        output = self.model(**inputs)
        output.logits = output.logits * self.model.model.norm.weight.sum()
        return output


def test_a_use_that_no_module_shows_is_found_by_its_number():
    with pytest.raises(StartError, match=r"differ from autograd's by a share of 0.007"):
        require_measurable_norms(Bypassing(), packs=False)


def test_memory_that_runs_out_is_not_taken_for_a_result(monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA")

    monkeypatch.setattr("vcpo_learner.forward.measurable_norms.forward_pass", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        require_measurable_norms(seeded_model(llama), packs=False)


def test_no_trajectory_of_the_check_holds_the_padding_token():
    model = seeded_model(llama)
    seen = set()
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: seen.update(inputs[0][:, 0].tolist())
    )
    require_measurable_norms(model, packs=False)
    assert model.model.embed_tokens.padding_idx == PAD
    assert seen == {PAD + 1, PAD + 2, PAD + 3}
    seen.clear()
    require_measurable_norms(model, packs=False, is_half=True)
    assert PAD not in seen
    assert len(seen) > 3


@pytest.mark.parametrize(("spoiled", "is_refused"), [(1, False), (3, True)])
def test_what_most_draws_find_decides_in_16_bits(monkeypatch, spoiled, is_refused):
    # Rounding of few tokens passes 0.1 in models of 135 M parameters, as of one draw of four.
    shares = iter([0.2] * spoiled + [0.01] * (4 - spoiled))
    monkeypatch.setattr(measurable_norms, "_difference", lambda *_: next(shares))
    refused = pytest.raises(StartError, match=r"a share of 0.2\)") if is_refused else nullcontext()
    with refused:
        require_measurable_norms(seeded_model(llama), packs=False, is_half=True)


def test_rounding_in_16_bits_averages_over_the_tokens_of_the_check():
    model = seeded_model(llama).bfloat16()
    add_adapters(model, Lora(rank=2))
    batch = measurable_norms._batch(model, 0, packs=False)
    assert batch.response_mask.sum(dim=1).tolist() == [48, 24, 24]
    require_measurable_norms(model, packs=False, is_half=True)


def test_norms_of_a_tiled_head_are_checked_too(monkeypatch):
    network = PolicyNetwork(seeded_model(llama))
    network.compare_head()
    require_measurable_norms(network, packs=False)
    own = TrajectoryGradients.measure

    def measure(gradients):
        own(gradients)
        gradients.matrix_norms *= 2.0

    monkeypatch.setattr(TrajectoryGradients, "measure", measure)
    with pytest.raises(StartError, match="differ from autograd's"):
        require_measurable_norms(network, packs=False)


def test_adapters_whose_gradient_is_zero_by_nature_are_accepted():
    # With one token to attend to, a query has no influence; tiles round another way.
    model = seeded_model(llama)
    add_adapters(model, Lora(rank=2, targetModules=["q_proj"]))
    network = PolicyNetwork(model)
    network.compare_head()
    require_measurable_norms(network, packs=False)


def deep(make, num_layers=6, **fields):
    """A model of a family of the fixtures, with more layers and tokens."""
    config = make().config
    settings = {**config.to_dict(), "vocab_size": 700}
    settings[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = num_layers
    settings["layer_types"] = (settings.get("layer_types") or [])[:1] * num_layers or None
    return type(make())(type(config).from_dict({**settings, **fields})).eval()


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_deep_model_is_checked_on_a_twin_with_one_layer_of_each_kind(family, packs):
    model = deep(EVERY_FAMILY[family])
    select_attention(model, Attention.AUTO, packs=packs)
    twin = make_twin(model)
    assert (len(decoder_layers(twin)), twin.config.vocab_size) == (2, 512)
    assert twin.config._attn_implementation == model.config._attn_implementation
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    before = torch.get_rng_state()
    require_measurable_norms(model, packs=packs)
    assert not calls
    assert torch.equal(torch.get_rng_state(), before)


def test_a_twin_has_each_kind_of_layer_its_fused_parts_and_its_checkpoints():
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    model = deep(qwen2, 4, layer_types=kinds, use_sliding_window=True, sliding_window=4)
    set_checkpoints(model, ActivationCheckpointing.LAYERS)
    fuse_layers(model, is_half=True)
    twin = make_twin(model)
    assert fused_parts(twin) == fused_parts(model) == (False, True)
    assert twin.config.layer_types == ["sliding_attention", "full_attention"]
    assert are_checkpointed(twin)


class Scaled(LlamaMLP):
    """A layer's own part, which uses its norm's weight a second time."""

    def forward(self, x):
        return super().forward(x) * self.norm[0].weight.sum()


def changed(model):
    model.model.layers[4].mlp = Scaled(model.config)
    model.model.layers[4].mlp.norm = [model.model.norm]


def frozen(model):
    model.model.embed_tokens.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [changed, frozen])
def test_a_model_that_its_configuration_does_not_make_is_checked_itself(change):
    model = deep(llama)
    change(model)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    require_measurable_norms(model, packs=False)
    assert calls
