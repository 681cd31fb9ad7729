"""A model that this engine would sample from wrongly is refused by what is measured."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.fixtures.families import ATTENTION, HYBRIDS, INDEXED, OTHER_STATE, family
from tests.fixtures.rollout.models import build_model, parameters_of, request_for, weights_of
from vcpo.service.lifecycle import StartError
from vcpo.service.rotary_table import fix_rotary_table
from vcpo.wire.limits import MAX_ROUTE_BYTES
from vcpo_rollout.engines.hf.decoding import DecodeBatch, PartialSequence, require_decodable
from vcpo_rollout.engines.hf.engine import HfEngine
from vcpo_rollout.engines.hf.routes import RouteRecorder, packed_routes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ATTENTION | HYBRIDS | INDEXED)
def test_models_whose_state_the_cache_keeps_pass(kind, dtype):
    model = family(kind).to(dtype)
    fix_rotary_table(model)
    require_decodable(model, 0)


def test_a_token_by_itself_has_the_time_steps_of_a_whole_pass():
    model = family("granitemoehybrid", time_step_limit=(5.0, 6.0))
    batch = DecodeBatch(model, end_token_ids=frozenset(), pad_token_id=0, seed=0)
    batch.swap(1, parameters_of(model))


def test_a_state_that_is_lost_between_chunks_is_seen_before_the_first_token(monkeypatch):
    model = family("qwen3_5_text")
    model.model.layers[0].linear_attn.A_log.data.fill_(-4.0)  # it remembers 64 tokens
    whole, size = modeling_qwen3_5.torch_chunk_gated_delta_rule, 64

    def losing(*tensors, g, beta, initial_state, **options):
        del initial_state
        parts = zip(*(torch.split(each, size, dim=1) for each in (*tensors, g, beta)), strict=True)
        found = [whole(*part[:3], g=part[3], beta=part[4], **options) for part in parts]
        return torch.cat([output for output, _ in found], dim=1), found[-1][1]

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", losing)
    with pytest.raises(StartError, match="engine hf would sample wrongly"):
        require_decodable(model, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OTHER_STATE)
def test_models_of_another_state_are_refused_with_their_family(kind, dtype):
    with pytest.raises(StartError, match=rf"^spec\.model\.name: engine hf .* family {kind}\b"):
        require_decodable(family(kind).to(dtype), 0)


async def test_the_first_weights_of_an_engine_are_checked():
    model = family("rwkv")
    weights = weights_of(model, 1)
    engine = HfEngine(
        model, end_token_ids=frozenset(), pad_token_id=0, max_concurrent_sequences=4, seed=0
    )
    gaps = r"alone differ by [\d.]+ nats .* and by [\d.]+ nats .*; use `engine: vllm`"
    with pytest.raises(StartError, match=gaps):
        await engine.swap_weights(weights)
    assert engine.policy_version is None
    await engine.close()


def test_weights_that_are_not_finite_are_for_the_sampler_to_report():
    model = build_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    require_decodable(model, 0)


SHORT, LONG = (5, 6), (9, 3, 3, 7, 12)


def mixtral(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = MixtralConfig(**sizes, **heads, num_local_experts=6, num_experts_per_tok=2)
    return MixtralForCausalLM(config).eval()


def chosen(model, tokens):
    """What the routers choose for a row of tokens, [tokens, layers, choices]."""
    found = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda *given: found.append(given[2][2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return torch.stack(found, dim=1).tolist()


def routes_of(generation):
    routes = generation.expert_routes
    shape = routes.num_tokens, routes.num_layers, routes.num_choices
    return torch.tensor(list(routes.experts)).view(shape).tolist()


def decoding():
    model = mixtral(1)
    batch = DecodeBatch(
        model, end_token_ids=frozenset(), pad_token_id=0, seed=0, routes=RouteRecorder(model)
    )
    batch.swap(1, parameters_of(mixtral(1)))
    return batch


def run(batch):
    ended = {}
    while batch.sequences:
        ended |= batch.step()
    return ended


def test_each_token_but_the_last_has_the_experts_of_a_full_forward():
    batch = decoding()
    prompts = (LONG, SHORT, SHORT)
    batch.admit([PartialSequence(request=request_for(prompt)) for prompt in prompts])
    batch.step()
    batch.admit([PartialSequence(request=request_for(SHORT))])
    for sequence, generation in run(batch).items():
        tokens = [*sequence.request.prompt_token_ids, *generation.token_ids]
        assert routes_of(generation) == chosen(mixtral(1), tokens)[:-1]


def test_after_a_swap_each_token_has_the_experts_by_which_the_next_was_sampled():
    batch = decoding()
    batch.admit([PartialSequence(request=request_for(prompt)) for prompt in (LONG, SHORT)])
    for _ in range(3):
        batch.step()
    batch.swap(2, parameters_of(mixtral(2)))
    for sequence, generation in run(batch).items():
        prompt = sequence.request.prompt_token_ids
        tokens = [*prompt, *generation.token_ids]
        # The third sampled token was read before the swap and again after it.
        num_old = len(prompt) + 2
        by_old, by_new = (chosen(mixtral(seed), tokens)[:-1] for seed in (1, 2))
        assert by_old != by_new
        assert routes_of(generation) == by_old[:num_old] + by_new[num_old:]


def test_nobody_who_does_not_ask_gets_routes():
    model = mixtral(1)
    batch = DecodeBatch(model, end_token_ids=frozenset(), pad_token_id=0, seed=0)
    batch.swap(1, parameters_of(model))
    batch.admit([PartialSequence(request=request_for(SHORT))])
    (generation,) = run(batch).values()
    assert generation.expert_routes is None


def test_a_model_without_routers_is_refused():
    with pytest.raises(ValueError, match=r"spec.algorithm.routerReplay: true, but .* use false"):
        RouteRecorder(build_model())


def test_routes_of_many_experts_take_two_bytes_and_of_too_many_the_first_travel():
    few = packed_routes([torch.tensor([[[255, 0]]]), torch.tensor([[[1, 2]]])])
    many = packed_routes([torch.tensor([[[256, 0]]])])
    assert few is not None
    assert many is not None
    assert (few.experts, few.is_wide, few.num_tokens) == (bytes((255, 0, 1, 2)), False, 2)
    assert (many.experts, many.is_wide, many.num_tokens) == (bytes((0, 1, 0, 0)), True, 1)
    assert packed_routes([]) is None
    long = packed_routes([torch.full((MAX_ROUTE_BYTES // 8, 3, 2), 300, dtype=torch.int16)])
    assert (long.num_tokens, long.experts[:2]) == (MAX_ROUTE_BYTES // 12, bytes((44, 1)))
