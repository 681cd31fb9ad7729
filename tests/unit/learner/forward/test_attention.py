"""Attention without masks, against every trajectory alone under the model's own definition."""

import math
from functools import wraps
from itertools import chain

import pytest
import torch
from torch.nn import functional
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.fixtures.families import family as family_of
from tests.fixtures.learner.models import PAD, VOCABULARY, own_logprobs, sampled_groups
from tests.fixtures.learner.norms import LargestTensor
from tests.fixtures.learner.updates import expected_gradient, gradient_of_step, make_spec
from vcpo.api.algorithm import RowLayout
from vcpo.api.learner import Attention
from vcpo.service.lifecycle import StartError
from vcpo_learner.forward import attention
from vcpo_learner.forward.attention import select_attention
from vcpo_learner.forward.forward_pass import token_logprobs
from vcpo_learner.forward.token_batch import token_batch

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": PAD,
}
WINDOW = {"sliding_window": 3}
SLIDING_AND_FULL = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, ungrouped": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "qwen2, window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {**SLIDING_AND_FULL, "use_sliding_window": True},
    ),
    "gemma2, window and soft cap": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {**SLIDING_AND_FULL, "head_dim": 8, "attn_logit_softcapping": 0.5},
    ),
    "gemma3, window": (Gemma3ForCausalLM, Gemma3TextConfig, {**SLIDING_AND_FULL, "head_dim": 8}),
    "phi3, window": (Phi3ForCausalLM, Phi3Config, WINDOW),
}


def build(family):
    """A model with random parameters; attention as its own definition has it."""
    make, config, fields = FAMILIES[family]
    torch.manual_seed(0)
    model = make(config(**{**SMALL, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model.set_attn_implementation("eager")
    return model


def spec_with(wanted, *, packs):
    spec = make_spec()
    layout = RowLayout.PACKED if packs else RowLayout.PADDED
    return spec.model_copy(
        update={
            "learner": spec.learner.model_copy(update={"attention": wanted}),
            "batch": spec.batch.model_copy(update={"row_layout": layout}),
        }
    )


@pytest.fixture(params=[256, 2], ids=["one block", "many blocks"])
def query_block(request, monkeypatch):
    monkeypatch.setattr(attention, "_QUERY_BLOCK", request.param)


@pytest.mark.usefixtures("query_block")
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_trajectory_is_scored_as_if_it_were_alone(family, packs):
    model = build(family)
    trajectories = list(chain.from_iterable(sampled_groups(model)))
    alone = torch.cat([own_logprobs(model, one) for one in trajectories])
    assert select_attention(model, Attention.VARLEN, packs=packs)
    batch = token_batch(trajectories, PAD, CPU, packs=packs)
    found = batch.select_trained(token_logprobs(model, batch, temperature=1.0))
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "packs"),
    # Gemma3's norms of single heads have no token axis that unpacking knows.
    [
        (family, packs)
        for family in FAMILIES
        for packs in (False, True)
        if not (packs and family.startswith("gemma3"))
    ],
)
def test_a_step_has_the_gradient_of_the_models_own_attention(family, packs):
    groups = sampled_groups(build(family))
    expected = expected_gradient(build(family), groups, "opob")
    found = gradient_of_step(build(family), spec_with(Attention.VARLEN, packs=packs), groups)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def largest_tensor(family, wanted, *, packs):
    """Of forward and backward pass over four responses of a quarter of 1,024 tokens."""
    model = build(family)
    model.set_attn_implementation("sdpa")
    select_attention(model, wanted, packs=packs)
    (one, *_), *_ = sampled_groups(model)
    tokens = tuple(1 + at % (VOCABULARY - 1) for at in range(254))
    one = type(one)(
        trajectory_id="lease/0",
        prompt_token_ids=(1, 2),
        response_token_ids=tokens,
        rollout_logprobs=(-1.0,) * len(tokens),
        version_spans=one.version_spans,
        reward=0.0,
        finish_reason=one.finish_reason,
    )
    batch = token_batch([one] * 4, PAD, CPU, packs=packs)
    with LargestTensor() as seen:
        torch.autograd.backward(token_logprobs(model, batch, temperature=1.0).sum())
    return seen.numel


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_of_tokens_times_tokens_is_made(family, monkeypatch):
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 64)
    row = 4 * 256
    assert largest_tensor(family, Attention.VARLEN, packs=True) < row**2 / 8


def test_a_padded_row_needs_no_mask():
    assert largest_tensor("llama, ungrouped", Attention.SDPA, packs=False) < 256**2


def reference_kernel(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
):
    """What torch documents of `varlen_attn`, one query at a time."""
    assert cu_seq_q.dtype is cu_seq_k.dtype is torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    assert right == 0
    key, value = (
        each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value)
    )
    rows = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        for at in range(start, end):
            first = start if left == -1 else max(start, at - left)
            scores = torch.einsum("hd,thd->ht", query[at], key[first : at + 1]) * scale
            rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), value[first : at + 1]))
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["llama", "qwen2, window", "phi3, window"])
def test_a_gpus_kernel_is_given_what_its_documentation_asks_for(family, monkeypatch):
    model = build(family)
    trajectories = list(chain.from_iterable(sampled_groups(model)))
    alone = torch.cat([own_logprobs(model, one) for one in trajectories])
    select_attention(model, Attention.VARLEN, packs=True)
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_attn", reference_kernel)
    batch = token_batch(trajectories, PAD, CPU, packs=True)
    found = batch.select_trained(token_logprobs(model, batch, temperature=1.0))
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "config", "fields"),
    [
        (LlamaForCausalLM, LlamaConfig, {}),
        (Qwen2ForCausalLM, Qwen2Config, {}),
        (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    ],
)
def test_under_autocast_a_gpus_kernel_gets_queries_keys_and_values_of_one_short_type(
    make, config, fields, monkeypatch
):
    model = make(config(**{**SMALL, **fields}))
    select_attention(model, Attention.VARLEN, packs=True)
    seen = []

    @wraps(reference_kernel)
    def kernel(query, key, value, *arguments, **options):
        seen.append({query.dtype, key.dtype, value.dtype})
        return reference_kernel(query, key, value, *arguments, **options)

    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    trajectories = list(chain.from_iterable(sampled_groups(model)))
    batch = token_batch(trajectories, PAD, CPU, packs=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        token_logprobs(model, batch, temperature=1.0)
    assert seen == [{torch.bfloat16}] * 2  # one call a layer


def test_a_kernel_without_an_argument_for_fewer_keys_is_not_given_one(monkeypatch):
    """Torch 2.11 has `(query .. max_k, *, return_aux, scale, window_size)`."""

    def kernel_of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
        options = {"scale": scale, "window_size": window_size}
        return reference_kernel(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, enable_gqa=True, **options
        )

    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_attn", kernel_of_2_11)
    query, keys = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    arguments = {"cu_seq_lens_q": ends, "max_length_q": 3}
    found, _ = attention.varlen_attention(torch.nn.Module(), query, keys, keys, None, **arguments)
    monkeypatch.undo()
    alone, _ = attention.varlen_attention(torch.nn.Module(), query, keys, keys, None, **arguments)
    torch.testing.assert_close(found, alone)


def test_a_soft_cap_counts():
    # Two tokens, one head of one number: scores 3 and 6 become tanh(3) and tanh(6) with a cap of 1.
    query = torch.tensor([[[[0.0], [3.0]]]])
    key, value = torch.tensor([[[[1.0], [2.0]]]]), torch.tensor([[[[0.0], [1.0]]]])
    found, _ = attention.varlen_attention(
        torch.nn.Module(), query, key, value, None, scaling=1.0, softcap=1.0
    )
    weight = math.exp(math.tanh(6.0)) / (math.exp(math.tanh(3.0)) + math.exp(math.tanh(6.0)))
    assert found.flatten().tolist() == pytest.approx([0.0, weight])


@pytest.mark.parametrize(
    "ends", [{}, {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "max_length_q": 3}]
)
def test_what_it_returns_can_be_viewed_as_one_vector_a_token(ends):
    """Some families join the heads by a view, as they may after transformers' own attention."""
    numbers = torch.randn(1, 2, 5, 4)
    found, _ = attention.varlen_attention(
        torch.nn.Module(), numbers, numbers, numbers, None, **ends
    )
    assert found.view(1, 5, 8).shape == (1, 5, 8)


def test_what_it_does_not_compute_is_refused():
    numbers = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="Linear wants a mask, sinks, dropout"):
        attention.varlen_attention(
            torch.nn.Linear(1, 1), numbers, numbers, numbers, None, s_aux=torch.zeros(1)
        )


@pytest.mark.parametrize(
    ("family", "wanted", "packs", "is_varlen"),
    [
        ("llama", Attention.AUTO, False, False),
        ("llama", Attention.AUTO, True, True),
        ("llama", Attention.VARLEN, False, True),
        # Transformers' sdpa leaves the soft cap out.
        ("gemma2, window and soft cap", Attention.AUTO, False, True),
    ],
)
def test_auto_takes_it_where_it_saves_a_mask_or_a_mistake(family, wanted, packs, is_varlen):
    assert select_attention(build(family), wanted, packs=packs) is is_varlen


@pytest.mark.parametrize(("num_tokens", "dtype"), [(256, torch.float32), (257, torch.bfloat16)])
def test_short_rows_of_a_cpu_attend_in_float32(num_tokens, dtype, monkeypatch):
    model, own, seen = build("llama"), functional.scaled_dot_product_attention, []

    def look(query, *others, **options):
        seen.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return own(query, *others, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", look)
    assert select_attention(model, Attention.AUTO, packs=False, is_half=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        numbers = [torch.randn(2, 4, num_tokens, 8, dtype=torch.bfloat16) for _ in range(3)]
        found, _ = attention.varlen_attention(model.model.layers[0].self_attn, *numbers, None)
    assert found.dtype is torch.bfloat16
    assert seen == [(dtype, dtype is torch.bfloat16)]
    with torch.autocast("cpu", enabled=False):
        exact = own(*(each.double() for each in numbers), is_causal=True)
    torch.testing.assert_close(found.transpose(1, 2).double(), exact, rtol=0.02, atol=0.02)


def sinks():
    fields = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    return GptOssForCausalLM(GptOssConfig(**SMALL, **fields))


def window_in_its_mask(**options):
    fields = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, **WINDOW}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, **fields, **options))


def test_a_window_that_only_the_mask_has_is_not_packed():
    layers = ["sliding_attention", "full_attention"]
    sliding = window_in_its_mask(use_sliding_window=True, layer_types=layers)
    with pytest.raises(StartError, match="puts its sliding window into a mask only; use padded"):
        select_attention(sliding, Attention.AUTO, packs=True)
    assert select_attention(window_in_its_mask(), Attention.AUTO, packs=True) is True


@pytest.mark.parametrize(
    ("model", "wanted", "reason"),
    [
        (sinks, Attention.VARLEN, "varlen, but GptOssForCausalLM has attention sinks; use auto"),
        (
            lambda: build("gemma2, window and soft cap"),
            Attention.SDPA,
            "sdpa leaves out the soft cap that Gemma2ForCausalLM",
        ),
    ],
)
def test_a_model_that_cannot_is_refused_with_the_field_and_the_cure(model, wanted, reason):
    with pytest.raises(StartError, match=f"spec.learner.attention: {reason}"):
        select_attention(model(), wanted, packs=False)


@pytest.mark.parametrize(
    ("model", "wanted", "reason"),
    [
        (sinks, Attention.AUTO, "GptOssForCausalLM has attention sinks"),
        (lambda: family_of("bloom"), Attention.AUTO, "BloomForCausalLM gives its attention a mask"),
        (lambda: family_of("llama4"), Attention.AUTO, "Llama4ForCausalLM gives its attention a"),
        (lambda: torch.nn.Linear(1, 1), Attention.AUTO, "it is not a transformers model"),
        (lambda: build("llama"), Attention.SDPA, "learner.attention is sdpa"),
    ],
    ids=["sinks", "bloom", "llama4", "another module", "sdpa"],
)
def test_what_does_not_keep_trajectories_apart_is_not_packed(model, wanted, reason):
    with pytest.raises(StartError, match=f"^spec.batch.rowLayout: packed, but {reason}.*padded$"):
        select_attention(model(), wanted, packs=True)


def test_the_name_is_not_written_into_a_models_files():
    model = build("llama")
    select_attention(model, Attention.VARLEN, packs=True)
    assert attention.NAME not in model.config.to_json_string()
