"""Rows that no token has: sampler and learner leave them out of the same softmax."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fixtures.rollout.models import parameters_of, request_for
from tests.fixtures.vocabularies import tokenizer_of
from vcpo.service.vocabulary import keep_vocabulary
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.forward.policy_network import PolicyNetwork, Wanted
from vcpo_learner.forward.token_batch import token_batch
from vcpo_rollout.engines.hf.decoding import DecodeBatch, PartialSequence

TEMPERATURE = 0.8
PROMPTS = ((0, 5), (3,), (7, 7, 1))


def build(ids, *, num_spare, tied, size):
    """A model with rows up to the last id and some more; a row without a token is this large."""
    torch.manual_seed(0)
    num_rows = max(ids) + 1 + num_spare
    config = LlamaConfig(
        vocab_size=num_rows,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    spare = sorted(set(range(num_rows)) - set(ids))
    with torch.no_grad():
        for layer in (model.model.embed_tokens, model.lm_head):
            layer.weight[spare] = size
    keep_vocabulary(model, tokenizer_of(ids))
    return model


def sampled(model):
    """Trajectories as the engine samples them."""
    batch = DecodeBatch(model, end_token_ids=frozenset(), pad_token_id=0, seed=0)
    batch.swap(1, parameters_of(model))
    requests = [
        request_for(prompt, max_new_tokens=6, temperature=TEMPERATURE, seed=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    batch.admit([PartialSequence(request=request) for request in requests])
    ended = {}
    while batch.sequences:
        ended |= batch.step()
    return [
        Trajectory(
            trajectory_id=str(number),
            prompt_token_ids=sequence.request.prompt_token_ids,
            response_token_ids=one.token_ids,
            rollout_logprobs=one.logprobs,
            version_spans=one.version_spans,
            reward=0.0,
            finish_reason=one.finish_reason,
        )
        for number, (sequence, one) in enumerate(ended.items())
    ]


@settings(deadline=None, max_examples=25)
@given(
    num_spare=st.integers(0, 300),
    holes=st.sets(st.integers(8, 30)),
    tied=st.booleans(),
    size=st.sampled_from([-1e30, 0.0, 5.0, 1e30]),
)
def test_sampler_and_learner_agree_with_any_number_of_spare_rows(num_spare, holes, tied, size):
    ids = [each for each in range(32) if each not in holes]
    model = build(ids, num_spare=num_spare, tied=tied, size=size)
    trajectories = sampled(model)
    assert {token for one in trajectories for token in one.response_token_ids} <= set(ids)
    drawn = torch.cat([torch.tensor(one.rollout_logprobs) for one in trajectories])
    batch = token_batch(trajectories, 0, torch.device("cpu"))
    for tiles in (False, True):
        wanted = Wanted(temperature=TEMPERATURE, tiles=tiles)
        scored = PolicyNetwork(model).score(batch, wanted).logprobs
        torch.testing.assert_close(scored, drawn, rtol=0.0, atol=1e-5)
    scored.sum().backward()
    spare = sorted(set(range(model.config.vocab_size)) - set(ids))
    for layer in (model.model.embed_tokens, model.lm_head):
        assert not layer.weight.grad[spare].any()
