"""Ends of an engine on a real vLLM: killed, stuck, failed half-way."""

import asyncio
import multiprocessing
import os
import signal

import pytest
import safetensors.torch
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

from tests.fixtures.rollout.models import request_for, weights_of
from tests.unit.rollout.engines.vllm.tiny_vllm import build, save_settings
from vcpo_rollout.engines.engine import EngineError
from vcpo_rollout.engines.vllm.engine import VllmEngine
from vcpo_rollout.engines.vllm.last_error import LastError
from vcpo_rollout.engines.vllm.start import load_skeleton, start_llm

ENDLESS = 30_000
"""More tokens than a test lives to see."""
PATIENCE_S = 120.0


class DyingLlm:
    """vLLM that fails in a call to update the weights."""

    def __init__(self, llm):
        self._llm = llm
        self.fails_in_update = False

    def __getattr__(self, name):
        return getattr(self._llm, name)

    async def update_weights(self, request):
        if self.fails_in_update:
            raise RuntimeError("half of the tensors were loaded")
        await self._llm.update_weights(request)


async def update_in_part(llm, path):
    norm = {"model.norm.weight": build(seed=0).model.norm.weight.detach()}
    safetensors.torch.save_file(norm, path)
    await llm.start_weight_update()
    update = {"path": str(path), "shapes": None}
    await llm.update_weights(WeightTransferUpdateRequest(update_info=update))


async def test_the_death_of_vllms_process_and_its_cause_reach_every_caller(tmp_path):
    settings, last_error = save_settings(tmp_path), LastError()
    llm = await asyncio.to_thread(start_llm, settings, last_error)
    engine = VllmEngine(
        llm, skeleton=load_skeleton(settings), end_token_ids=frozenset(), last_error=last_error
    )
    await engine.swap_weights(weights_of(build(seed=0), 1))
    endless = request_for((9,), max_new_tokens=ENDLESS)
    generating = [asyncio.create_task(engine.generate(endless)) for _ in range(2)]
    async with asyncio.timeout(PATIENCE_S):
        # Without a pause the next step finds layers without values.
        updating = asyncio.create_task(update_in_part(llm, tmp_path / "part.safetensors"))
        results = await asyncio.gather(*generating, return_exceptions=True)
        updating.cancel()  # vLLM may not answer any more
        for attempt in (
            engine.generate(endless),
            engine.swap_weights(weights_of(build(seed=0), 2)),
        ):
            with pytest.raises(EngineError, match=r"engine process has died \(\w+Error: .*[Mm]eta"):
                await attempt
    assert [type(result) for result in results] == [EngineError, EngineError]
    await engine.close()


async def test_a_swap_that_fails_half_way_or_is_stuck_ends_the_engine_and_not_the_pause(tmp_path):
    others = set(multiprocessing.active_children())
    settings = save_settings(tmp_path)
    llm = DyingLlm(await asyncio.to_thread(start_llm, settings))
    (process,) = set(multiprocessing.active_children()) - others
    engine, stuck = (
        VllmEngine(llm, skeleton=load_skeleton(settings), end_token_ids=frozenset(), **limit)
        for limit in ({}, {"swap_timeout_s": 0.1})
    )
    async with asyncio.timeout(PATIENCE_S):
        await engine.swap_weights(weights_of(build(seed=0), 1))
        endless = request_for((9,), max_new_tokens=ENDLESS)
        generating = asyncio.create_task(engine.generate(endless))
        llm.fails_in_update = True
        swapping = engine.swap_weights(weights_of(build(seed=0), 2))
        for each in (swapping, generating, engine.generate(endless)):
            with pytest.raises(EngineError, match="policy version 2: RuntimeError: half of"):
                await each
        assert await llm.is_paused()
        os.kill(process.pid, signal.SIGSTOP)
        for each in (stuck.swap_weights(weights_of(build(seed=0), 1)), stuck.generate(endless)):
            with pytest.raises(EngineError, match="policy version 1: TimeoutError"):
                await each
    await stuck.close()
    await asyncio.to_thread(process.join, PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL
    await engine.close()
