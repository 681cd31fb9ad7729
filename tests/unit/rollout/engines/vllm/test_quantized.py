"""Quantization by a real vLLM."""

import asyncio
import copy
from statistics import mean

import pytest
import pytest_asyncio
import torch
from vllm import AsyncEngineArgs
from vllm.config.quantization import QUANT_KEY_NAMES

from tests.fixtures.rollout.models import forward_logprobs, request_for, weights_of
from tests.unit.rollout.engines.vllm.tiny_vllm import (
    assert_equal_where_both_sampled,
    build,
    first_logprobs,
    save_settings,
    start,
)
from vcpo.algo.health.mismatch_review import MISMATCH_LIMITS_NATS, MismatchClass
from vcpo.api.workloads import Precision
from vcpo_rollout.engines.vllm.start import engine_arguments
from vcpo_rollout.engines.weight_plan import FP8_PER_BLOCK

METHOD = "fp8_per_channel"
"""Slow on a CPU, and what runs there: on its way into the kernels it is a method like any other."""
PROMPT = tuple(range(4, 40))
NUM_RESPONSES = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory):
    engine = await start(
        tmp_path_factory.mktemp("quantized"),
        precision=Precision.BFLOAT16,
        online_quantization=METHOD,
    )
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first_version(engine):
    """Numbers of the first version that the engine gets."""
    await engine.swap_weights(weights_of(build(seed=3), 0))
    return await first_logprobs(engine, request_for(PROMPT, max_new_tokens=1))


async def respond(engine, request):
    return await asyncio.gather(*(engine.generate(request) for _ in range(NUM_RESPONSES)))


def rounded_rows(rows):
    """E4M3 with one scale per row of the last dimension, amax / 448."""
    scale = rows.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / 448
    return ((rows.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(rows.dtype)


@torch.no_grad()
def quantize_like_vllm(model):
    """A bfloat16 model whose layers multiply E4M3 weights, by row, with E4M3 inputs, by token."""
    quantized = copy.deepcopy(model).bfloat16()
    for name, layer in quantized.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.copy_(rounded_rows(layer.weight))
            layer.register_forward_pre_hook(lambda _, inputs: (rounded_rows(inputs[0]),))
    return quantized


@torch.no_grad()
def moderate(*, seed):
    """A model whose logits differ by about one, as those of language models do."""
    model = build(seed=seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(0.3)
    return model


def mismatch(responses, reference):
    """As the check at a run's start measures it, nats per token."""
    return mean(
        abs(ours - expected)
        for response in responses
        for ours, expected in zip(
            response.logprobs, forward_logprobs(reference, PROMPT, response.token_ids), strict=True
        )
    )


@pytest.mark.asyncio(loop_scope="module")
class TestQuantizedEngine:
    async def test_a_swap_leaves_what_a_fresh_engine_has(self, first_version, engine):
        request = request_for(PROMPT, max_new_tokens=1)
        await engine.swap_weights(weights_of(build(seed=2), 2))
        assert await first_logprobs(engine, request) != first_version
        await engine.swap_weights(weights_of(build(seed=3), 3))
        assert_equal_where_both_sampled(await first_logprobs(engine, request), first_version)

    async def test_its_numbers_are_those_of_fp8_weights_and_activations(self, engine):
        model = moderate(seed=1)
        await engine.swap_weights(weights_of(model, 4))
        request = request_for(PROMPT, max_new_tokens=64)
        responses = await respond(engine, request)

        def gap(reference):
            return mismatch(responses, reference)

        assert MISMATCH_LIMITS_NATS[MismatchClass.EXACT] < gap(model)
        assert gap(model) < MISMATCH_LIMITS_NATS[MismatchClass.QUANTIZED_OR_NOISY]
        # Not closer: sums in another order fall on the other side of a rounding here and there.
        assert gap(quantize_like_vllm(model)) < 0.75 * gap(model)


def test_vllm_takes_the_method_for_gpus_in_its_configuration(tmp_path):
    settings = save_settings(
        tmp_path, precision=Precision.BFLOAT16, online_quantization=FP8_PER_BLOCK
    )
    arguments = AsyncEngineArgs(**engine_arguments(settings, on_cpu=True))
    config = arguments.create_engine_config().quant_config
    assert config.args.linear.weight == QUANT_KEY_NAMES["fp8_per_block_static"]
    assert config.get_min_capability() <= 89
