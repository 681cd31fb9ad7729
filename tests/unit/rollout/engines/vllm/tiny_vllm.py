"""A real vLLM with tiny models; tests that import this are skipped where it cannot be loaded."""

import asyncio
import os
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vcpo.api.workloads import Model, RolloutGroup
from vcpo.service.vocabulary import keep_vocabulary

try:
    from vcpo_rollout.engines.vllm.engine import VllmEngine
    from vcpo_rollout.engines.vllm.start import VllmSettings
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit
    if os.environ.get("CI"):
        raise
    pytest.skip(f"vLLM cannot be loaded here: {error}", allow_module_level=True)

NUM_PLACES = 8
NUM_SEEDS = 12


def build(*, seed, tied=False, tokenizer=None):
    """A model of a shape that vLLM's kernels for the CPU take: heads of 32.

    tokenizer: has the tokens of the model; None for one that has a token for every row.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1 << 15,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    if tokenizer is not None:
        keep_vocabulary(model, tokenizer)
    return model


def save_settings(path, *, tied=False, tokenizer=None, **given):
    """Settings for models of `build`; only configuration and tokenizer are in `path`."""
    build(seed=0, tied=tied).config.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    of_group = {name: given.pop(name) for name in [*given] if name in RolloutGroup.model_fields}
    defaults = {"max_concurrent_sequences": NUM_PLACES, "kv_cache_gibibytes": 1 / 16}
    group = RolloutGroup.model_validate({"name": "vllm", **defaults, **of_group}, by_name=True)
    lora = given.pop("lora", None)
    model, serves_adapters = Model(name=str(path), lora=lora), lora is not None
    return VllmSettings(model=model, group=group, seed=0, serves_adapters=serves_adapters, **given)


async def start(path, *, tied=False, stop_strings=None, **settings):
    """An engine for models of `build`, with an end token."""
    return await asyncio.to_thread(
        VllmEngine.start,
        save_settings(path, tied=tied, **settings),
        end_token_ids=frozenset({3}),
        stop_strings=stop_strings,
    )


async def first_logprobs(engine, request):
    """Log-probabilities of a response's first token, of those that a few seeds draw.

    One request at a time: the same weights then give the same numbers, bit for bit. At temperature
    1 a single token may have nearly all of the probability.
    """
    requests = [replace(request, temperature=2.0, seed=seed) for seed in range(NUM_SEEDS)]
    responses = [await engine.generate(each) for each in requests]
    return {response.token_ids[0]: response.logprobs[0] for response in responses}


def assert_equal_where_both_sampled(found, expected):
    common = found.keys() & expected.keys()
    assert len(common) > 1
    assert {token: found[token] for token in common} == {token: expected[token] for token in common}
