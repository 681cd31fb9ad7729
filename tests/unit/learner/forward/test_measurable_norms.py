"""Models whose gradient norms cannot be measured are refused before the first step."""

import pytest
import torch
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.fixtures.learner.models import (
    FAMILIES,
    PAD,
    VOCABULARY,
    llama,
    sampled_groups,
    seeded_model,
)
from tests.fixtures.learner.updates import make_spec
from vcpo.algo import GradientNormEstimator
from vcpo.service.lifecycle import StartError
from vcpo.spec.workloads import Lora
from vcpo_learner.forward.measurable_norms import require_measurable_norms
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.output_head.trajectory_gradients import TrajectoryGradients
from vcpo_learner.update.policy_update import PolicyUpdate

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
}


def qwen3_moe():
    config = Qwen3MoeConfig(**SIZES, head_dim=8, moe_intermediate_size=8, num_experts=4)
    return Qwen3MoeForCausalLM(config)


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def gpt_oss():
    return GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=8, num_local_experts=4))


LINEAR_ATTENTION = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}


def qwen3_next():
    experts = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **LINEAR_ATTENTION, **experts))


def qwen3_5():
    sizes = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **LINEAR_ATTENTION))


EXPERTS = pytest.mark.parametrize("make", [qwen3_moe, mixtral])
EXACT, LM_HEAD = GradientNormEstimator.EXACT, GradientNormEstimator.LM_HEAD


@EXPERTS
def test_a_mixture_of_experts_is_refused_with_the_cure(make):
    with pytest.raises(StartError) as caught:
        PolicyUpdate(seeded_model(make), make_spec(), PAD)
    message = str(caught.value)
    assert message.startswith("spec.algorithm.gradientNorms: 'exact' norms of ")
    assert f"{make().__class__.__name__} cannot be measured (module 'model.layers.0.mlp" in message
    assert message.endswith("use 'logitEnergy', or a method without norms such as 'grpo'")


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (gpt_oss, r"'model.layers.0.self_attn' \(GptOssAttention\)"),
        (qwen3_next, r"'model.layers.0.linear_attn.norm' \(Qwen3NextRMSNormGated\)"),
        (qwen3_5, r"'model.layers.0.linear_attn.norm' \(Qwen3_5RMSNormGated\)"),
    ],
)
def test_layers_that_see_no_whole_trajectory_are_named_at_the_start(make, module):
    with pytest.raises(StartError, match=rf"cannot be measured \(module {module} returned"):
        require_measurable_norms(seeded_model(make), EXACT, packs=False)


@EXPERTS
@pytest.mark.parametrize(
    "algorithm",
    [
        {"gradientNorms": "logitEnergy"},
        {"gradientNorms": "lmHead"},
        {"method": "grpo", "baseline": None, "importanceWeightCap": None},
    ],
    ids=["logitEnergy", "lmHead", "grpo"],
)
def test_with_the_cure_a_mixture_of_experts_takes_its_step(make, algorithm):
    model = seeded_model(make)
    result = PolicyUpdate(model, make_spec(**algorithm), PAD).step(
        sampled_groups(model), policy_version=9
    )
    assert result.skipped is None
    assert result.gradient_norm > 0


@EXPERTS
@pytest.mark.filterwarnings("ignore:The following .* keys did not match")
def test_adapters_of_experts_are_refused_and_those_beside_them_are_not(make):
    everywhere, attention = seeded_model(make), seeded_model(make)
    add_adapters(everywhere, Lora(rank=2, alpha=4))
    with pytest.raises(StartError, match=r"gradientNorms: 'exact' norms"):
        PolicyUpdate(everywhere, make_spec(), PAD)
    chosen = Lora.model_validate({"rank": 2, "targetModules": ["q_proj", "v_proj"]})
    add_adapters(attention, chosen)
    update = PolicyUpdate(attention, make_spec(), PAD)
    assert update.step(sampled_groups(attention), policy_version=9).skipped is None


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_models_are_accepted_and_left_as_they_are(family, packs):
    model = seeded_model(FAMILIES[family])
    before = {name: each.clone() for name, each in model.named_parameters()}
    require_measurable_norms(model, EXACT, packs=packs)
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
        require_measurable_norms(Bypassing(), EXACT, packs=False)


def test_a_model_that_names_no_head_cannot_have_the_heads_norms():
    with pytest.raises(StartError, match=r"'lmHead' norms of Bypassing cannot be measured"):
        require_measurable_norms(Bypassing(), LM_HEAD, packs=False)


def test_memory_that_runs_out_is_not_taken_for_a_result(monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA")

    monkeypatch.setattr("vcpo_learner.forward.measurable_norms.forward_pass", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        require_measurable_norms(seeded_model(llama), EXACT, packs=False)


def test_no_trajectory_of_the_check_holds_the_padding_token():
    model = seeded_model(llama)
    seen = set()
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: seen.update(inputs[0][:, 0].tolist())
    )
    require_measurable_norms(model, EXACT, packs=False)
    assert model.model.embed_tokens.padding_idx == PAD
    assert seen == {PAD + 1, PAD + 2, PAD + 3}


def test_norms_of_a_tiled_head_are_checked_too(monkeypatch):
    network = PolicyNetwork(seeded_model(llama))
    network.compare_head()
    require_measurable_norms(network, EXACT, packs=False)
    own = TrajectoryGradients.measure

    def measure(gradients):
        own(gradients)
        gradients.matrix_norms *= 2.0

    monkeypatch.setattr(TrajectoryGradients, "measure", measure)
    with pytest.raises(StartError, match="differ from autograd's"):
        require_measurable_norms(network, EXACT, packs=False)


def test_adapters_whose_gradient_is_zero_by_nature_are_accepted():
    # With one token to attend to, a query has no influence; tiles round another way.
    model = seeded_model(llama)
    add_adapters(model, Lora(rank=2, targetModules=["q_proj"]))
    network = PolicyNetwork(model)
    network.compare_head()
    require_measurable_norms(network, EXACT, packs=False)
