"""A model split over two processes of a real vLLM, each of which takes its slice of a version."""

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys

import pytest
import pytest_asyncio

from tests.fixtures.rollout.models import forward_logprobs, request_for, weights_of
from tests.unit.rollout.engines.vllm.scoring import TOLERANCE, assert_scored_by_its_versions
from tests.unit.rollout.engines.vllm.tiny_adapters import adapted, make_adapters
from tests.unit.rollout.engines.vllm.tiny_vllm import build, start

PROMPT = (5, 6, 7)
NUM_PROCESSES = 2
PATIENCE_S = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory):
    engine = await start(tmp_path_factory.mktemp("split"), tensor_parallel_size=NUM_PROCESSES)
    yield engine
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
class TestSplitModel:
    async def test_every_token_is_scored_by_the_version_that_its_span_names(self, engine):
        models = {number: build(seed=number) for number in (11, 12, 13)}
        await engine.swap_weights(weights_of(models[11], 11))
        requests = [
            request_for(PROMPT, max_new_tokens=100, temperature=temperature)
            for temperature in (1.0, 0.7)
            for _ in range(3)
        ]
        generating = [asyncio.create_task(engine.generate(request)) for request in requests]
        taken_over = [
            await engine.swap_weights(weights_of(models[number], number)) for number in (12, 13)
        ]
        for generation, request in zip(await asyncio.gather(*generating), requests, strict=True):
            assert_scored_by_its_versions(generation, request, models)
        assert max(taken_over) > 0


WORKER = """
import asyncio, json, multiprocessing, os, sys
from pathlib import Path
from tests.fixtures.rollout.models import request_for
from tests.unit.rollout.engines.vllm.test_tensor_parallel import NUM_PROCESSES, PROMPT
from tests.unit.rollout.engines.vllm.tiny_adapters import LORA, make_adapters, version_of
from tests.unit.rollout.engines.vllm.tiny_vllm import build, start


async def sample(folder):
    base = build(seed=1)
    base.save_pretrained(folder)
    engine = await start(folder, lora=LORA, tensor_parallel_size=NUM_PROCESSES)
    for version in (1, 2):
        await engine.swap_weights(version_of(make_adapters(base, seed=version), version))
        found = await engine.generate(request_for(PROMPT, max_new_tokens=40))
        (span,) = found.version_spans
        yield [span.policy_version, found.token_ids, found.logprobs]


async def main(folder, pipe):
    generations = [each async for each in sample(folder)]
    (process,) = multiprocessing.active_children()
    below = [
        child
        for children in Path(f"/proc/{process.pid}/task").glob("*/children")
        for child in children.read_text().split()
    ]
    with os.fdopen(int(pipe), "w") as said:
        json.dump([[process.pid, *map(int, below)], generations], said)
    sys.stdin.read()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""
"""A worker in miniature: samples, says what and its processes, and waits.

It says so in a pipe of its own: other processes write to the standard output, also into a line.
"""


def test_each_process_takes_its_slice_of_adapters_and_none_outlives_a_killed_worker(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    said, said_by_worker = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, script, tmp_path / "model", str(said_by_worker)],
        stdin=subprocess.PIPE,
        pass_fds=[said_by_worker],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(said_by_worker)
    with worker, os.fdopen(said) as pipe:
        pids, generations = json.load(pipe)
        running = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a command that vLLM ran, and its end
                running.append(os.pidfd_open(pid))
        assert len(running) >= 1 + NUM_PROCESSES
        worker.kill()
        outlive = [each for each in running if not select.select([each], [], [], PATIENCE_S)[0]]
        for process in outlive:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        for process in running:
            os.close(process)
    assert not outlive
    assert [version for version, _, _ in generations] == [1, 2]
    base = build(seed=1)
    for version, token_ids, logprobs in generations:
        model = adapted(base, make_adapters(base, seed=version))
        expected = forward_logprobs(model, PROMPT, token_ids)
        assert logprobs == pytest.approx(expected, abs=TOLERANCE)
