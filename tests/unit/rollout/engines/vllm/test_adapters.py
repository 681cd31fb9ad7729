"""LoRA adapters served by a real vLLM beside a base model that it loads once."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import pytest_asyncio
import torch

from tests.fixtures.rollout.models import request_for
from tests.fixtures.vocabularies import tokenizer_of
from tests.unit.rollout.engines.vllm.scoring import assert_scored_by_its_versions
from tests.unit.rollout.engines.vllm.tiny_adapters import LORA, adapted, make_adapters, version_of
from tests.unit.rollout.engines.vllm.tiny_vllm import NUM_PLACES, build, save_settings, start
from vcpo.api.workloads import Lora
from vcpo_rollout.engines.engine import EngineError
from vcpo_rollout.engines.vllm.loaders import AdapterLoader
from vcpo_rollout.engines.vllm.start import engine_arguments
from vcpo_rollout.engines.vllm.worker import WorkerExtension

PROMPT = (5, 6, 7)
LONG_PROMPT = tuple(range(32)) * 6
"""Longer than a block of keys and values (128 tokens), so that its beginning is cached."""
WORDS = tokenizer_of([*range(11), *range(13, 32)])
"""Of the 40 rows, 11, 12 and those from 32 on have no token."""


@pytest.fixture(scope="module")
def base():
    return build(seed=1, tokenizer=WORDS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    base.save_pretrained(folder)
    WORDS.save_pretrained(folder)
    engine = await start(folder, lora=LORA)
    # The base is loaded at the start, and never again.
    (folder / "model.safetensors").unlink()
    yield engine
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
class TestServedAdapters:
    async def test_every_token_is_scored_by_the_adapters_of_the_version_that_its_span_names(
        self, engine, base
    ):
        adapters = {version: make_adapters(base, seed=version) for version in (11, 12, 13, 14)}
        models = {version: adapted(base, tensors) for version, tensors in adapters.items()}
        await engine.swap_weights(version_of(adapters[11], 11))
        requests = [
            request_for(prompt, max_new_tokens=100, temperature=temperature)
            for prompt in (PROMPT, (9,), LONG_PROMPT)
            for temperature in (1.0, 0.7)
            for _ in range(2)
        ]
        assert len(requests) > NUM_PLACES  # so that some wait for a place at a swap
        generating = [asyncio.create_task(engine.generate(request)) for request in requests]
        taken_over = [
            await engine.swap_weights(version_of(adapters[version], version))
            for version in (12, 13, 14)
        ]
        generations = await asyncio.gather(*generating)
        for generation, request in zip(generations, requests, strict=True):
            assert_scored_by_its_versions(generation, request, models)
        assert max(taken_over) > 0
        assert max(len(generation.version_spans) for generation in generations) > 1

    async def test_no_prefix_read_by_old_adapters_is_used_with_new_ones(self, engine, base):
        request = request_for(LONG_PROMPT)
        for version in (21, 22, 23):
            tensors = make_adapters(base, seed=version)
            weights = version_of(tensors, version)
            await engine.swap_weights(weights)
            generation = await engine.generate(request)
            assert [span.policy_version for span in generation.version_spans] == [version]
            models = {version: adapted(base, tensors)}
            assert_scored_by_its_versions(generation, request, models)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda tensors: tensors.popitem(), "lora_B.default.weight is missing"),
            (
                lambda tensors: tensors.update({"model.norm.weight": torch.ones(64)}),
                r"model\.norm\.weight is not an adapter",
            ),
            (lambda tensors: tensors.clear(), "holds no adapter"),
        ],
        ids=["half an adapter", "a parameter", "nothing"],
    )
    async def test_what_is_no_set_of_adapters_leaves_the_old_ones_in_use(
        self, engine, base, change, message
    ):
        tensors = make_adapters(base, seed=41)
        await engine.swap_weights(version_of(tensors, 41))
        bad = make_adapters(base, seed=42)
        change(bad)
        with pytest.raises(EngineError, match=message):
            await engine.swap_weights(version_of(bad, 42))
        assert engine.policy_version == 41
        request = request_for(PROMPT)
        generation = await engine.generate(request)
        models = {41: adapted(base, tensors)}
        assert_scored_by_its_versions(generation, request, models)


async def test_a_version_whose_adapters_vllm_would_drop_is_an_error(base):
    held = {1: SimpleNamespace(loras=["language_model.q_proj", "mlp"])}

    def said_by_worker(layer):
        """Of two workers each has one of the model's layers."""
        manager = SimpleNamespace(list_adapters=lambda: held, modules=[layer])
        runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
        return WorkerExtension.layers_without_place(SimpleNamespace(model_runner=runner))

    llm = AsyncMock()
    llm.collective_rpc.return_value = [said_by_worker("q_proj"), said_by_worker("mlp")]
    with pytest.raises(EngineError, match=r"no place for the adapters of language_model\.q_proj "):
        await AdapterLoader(base, LORA).load(llm, None, 1)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (3, 8), (16, 16), (65, 128), (512, 512)])
def test_vllm_makes_room_for_the_next_rank_that_it_serves(tmp_path, rank, room):
    settings = save_settings(tmp_path, lora=Lora(rank=rank))
    arguments = engine_arguments(settings, on_cpu=False)
    assert (arguments["enable_lora"], arguments["max_loras"]) == (True, 1)
    assert arguments["max_lora_rank"] == room
    assert arguments["load_format"] == "safetensors"


@pytest.mark.parametrize(
    ("named", "adapted_layers"), [([], None), (["q_proj", "down_proj"], ["q_proj", "down_proj"])]
)
def test_vllm_leaves_alone_the_layers_that_get_no_adapter(tmp_path, named, adapted_layers):
    settings = save_settings(tmp_path, lora=Lora(targetModules=named))
    arguments = engine_arguments(settings, on_cpu=False)
    assert arguments["lora_target_modules"] == adapted_layers
