"""Ends of an engine on a real vLLM: killed, stuck, failed half-way, orphaned."""

import asyncio
import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys

import pytest

from tests.unit.rollout.engines.vllm.tiny_vllm import build, save_settings
from vcpo_rollout.engines.engine import EngineError
from vcpo_rollout.engines.vllm.engine import VllmEngine
from vcpo_rollout.engines.vllm.last_error import LastError
from vcpo_rollout.engines.vllm.start import load_skeleton, start_llm

PROMPT = (5, 6, 7)
ENDLESS = 30_000
"""More tokens than a test lives to see."""
PATIENCE_S = 120.0

STARTER = """
import multiprocessing, os, sys
from pathlib import Path
from vcpo.api.workloads import Precision
from vcpo_rollout.engines.vllm.engine import VllmEngine
from vcpo_rollout.engines.vllm.start import VllmSettings

if __name__ == "__main__":
    settings = VllmSettings(
        model_name=sys.argv[1], revision=None, precision=Precision.FLOAT32,
        max_concurrent_sequences=1, seed=0, kv_cache_gibibytes=1 / 16,
        tensor_parallel_size=int(sys.argv[2]),
    )
    engine = VllmEngine.start(settings, end_token_ids=frozenset())
    (process,) = multiprocessing.active_children()
    below = [
        child
        for children in Path(f"/proc/{process.pid}/task").glob("*/children")
        for child in children.read_text().split()
    ]
    with os.fdopen(int(sys.argv[3]), "w") as pids:
        print(process.pid, *below, file=pids)
    sys.stdin.read()
"""
"""A worker in miniature: starts an engine, says its process and those below, and waits.

It says so in a pipe of its own: other processes write to the standard output, also into a line.
"""


class DyingLlm:
    """vLLM that fails, or whose process is killed, in a call to update the weights."""

    def __init__(self, llm):
        self._llm = llm
        self.fails_in_update = False
        self.dies_in_update = None

    def __getattr__(self, name):
        return getattr(self._llm, name)

    async def update_weights(self, request):
        if self.fails_in_update:
            raise RuntimeError("half of the tensors were loaded")
        if self.dies_in_update is not None:
            os.kill(self.dies_in_update, signal.SIGSTOP)  # it gets the call and does nothing
        updating = asyncio.create_task(self._llm.update_weights(request))
        await asyncio.sleep(0)  # the call has started
        if self.dies_in_update is not None:
            os.kill(self.dies_in_update, signal.SIGKILL)
        await updating


async def test_the_death_of_vllms_process_and_its_cause_reach_every_caller(
    tmp_path, make_request, publish
):
    settings, last_error = save_settings(tmp_path), LastError()
    llm = await asyncio.to_thread(start_llm, settings, last_error)
    engine = VllmEngine(
        llm,
        skeleton=load_skeleton(settings),
        end_token_ids=frozenset(),
        last_error=last_error,
    )
    await engine.swap_weights(publish(build(seed=0), 1))
    endless = make_request((9,), max_new_tokens=ENDLESS)
    generating = [asyncio.create_task(engine.generate(endless)) for _ in range(2)]
    async with asyncio.timeout(PATIENCE_S):
        # Without a pause the next step finds layers without values.
        updating = asyncio.create_task(llm.start_weight_update())
        results = await asyncio.gather(*generating, return_exceptions=True)
        updating.cancel()  # vLLM may not answer any more
        for attempt in (
            engine.generate(endless),
            engine.swap_weights(publish(build(seed=0), 2)),
        ):
            with pytest.raises(EngineError, match=r"engine process has died \(\w+Error: .*[Mm]eta"):
                await attempt
    assert [type(result) for result in results] == [EngineError, EngineError]
    await engine.close()


async def test_a_death_in_the_middle_of_a_swap_reaches_every_caller(
    tmp_path, make_request, publish
):
    others = set(multiprocessing.active_children())
    settings = save_settings(tmp_path)
    llm = DyingLlm(await asyncio.to_thread(start_llm, settings))
    (process,) = set(multiprocessing.active_children()) - others
    engine = VllmEngine(llm, skeleton=load_skeleton(settings), end_token_ids=frozenset())
    await engine.swap_weights(publish(build(seed=0), 1))
    endless = make_request((9,), max_new_tokens=ENDLESS)
    generating = [asyncio.create_task(engine.generate(endless)) for _ in range(2)]
    llm.dies_in_update = process.pid
    swapping = engine.swap_weights(publish(build(seed=0), 2))
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(swapping, *generating, return_exceptions=True)
        with pytest.raises(EngineError, match="has died; its log may say why"):
            await engine.generate(endless)
    assert [type(result) for result in results] == [EngineError] * 3
    assert engine.policy_version == 1
    await engine.close()
    await asyncio.to_thread(process.join, PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL


async def test_a_swap_that_fails_half_way_ends_the_engine_and_not_the_pause(
    tmp_path, make_request, publish
):
    settings = save_settings(tmp_path)
    llm = DyingLlm(await asyncio.to_thread(start_llm, settings))
    engine = VllmEngine(llm, skeleton=load_skeleton(settings), end_token_ids=frozenset())
    async with asyncio.timeout(PATIENCE_S):
        await engine.swap_weights(publish(build(seed=0), 1))
        endless = make_request((9,), max_new_tokens=ENDLESS)
        generating = asyncio.create_task(engine.generate(endless))
        llm.fails_in_update = True
        swapping = engine.swap_weights(publish(build(seed=0), 2))
        for each in (swapping, generating, engine.generate(endless)):
            with pytest.raises(EngineError, match="policy version 2: RuntimeError: half of"):
                await each
        assert await llm.is_paused()
    await engine.close()


async def test_a_swap_that_is_stuck_ends_the_engine_and_its_process(
    tmp_path, make_request, publish
):
    others = set(multiprocessing.active_children())
    settings = save_settings(tmp_path)
    llm = await asyncio.to_thread(start_llm, settings)
    engine = VllmEngine(
        llm, skeleton=load_skeleton(settings), end_token_ids=frozenset(), swap_timeout_s=0.1
    )
    (process,) = set(multiprocessing.active_children()) - others
    os.kill(process.pid, signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EngineError, match="policy version 1: TimeoutError"):
            await engine.swap_weights(publish(build(seed=0), 1))
        with pytest.raises(EngineError, match="policy version 1: TimeoutError"):
            await engine.generate(make_request(PROMPT))
    await engine.close()
    await asyncio.to_thread(process.join, PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("gpus", [1, 2])
def test_no_process_of_vllm_outlives_a_killed_worker(tmp_path, gpus):
    build(seed=0).config.save_pretrained(tmp_path)
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    pids, pids_of_worker = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, script, tmp_path, str(gpus), str(pids_of_worker)],
        stdin=subprocess.PIPE,
        pass_fds=[pids_of_worker],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(pids_of_worker)
    with worker, os.fdopen(pids) as said:
        running = []
        for pid in said.read().split():
            with contextlib.suppress(ProcessLookupError):  # a command that vLLM ran, and its end
                running.append(os.pidfd_open(int(pid)))
        assert len(running) >= (1 if gpus == 1 else 1 + gpus)
        worker.kill()
        outlive = [each for each in running if not select.select([each], [], [], PATIENCE_S)[0]]
        for process in outlive:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        for process in running:
            os.close(process)
    assert not outlive
