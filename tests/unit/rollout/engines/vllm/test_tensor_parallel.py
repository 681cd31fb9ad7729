"""A model split over two processes of a real vLLM, each of which takes its slice of a version."""

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

from tests.fixtures.rollout.models import forward_logprobs, request_for, weights_of
from tests.fixtures.rollout.unpacked_vllm import UNPACKED
from tests.unit.rollout.engines.vllm.scoring import TOLERANCE, assert_scored_by_its_versions
from tests.unit.rollout.engines.vllm.tiny_adapters import adapted, make_adapters
from tests.unit.rollout.engines.vllm.tiny_vllm import build, save_settings
from vcpo_rollout.engines.engine import WeightChanges
from vcpo_rollout.engines.vllm.engine import VllmEngine
from vcpo_rollout.engines.vllm.start import load_skeleton, start_llm

PROMPT = (5, 6, 7)
NUM_PROCESSES = 2
PATIENCE_S = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def split(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    settings = save_settings(folder, tensor_parallel_size=NUM_PROCESSES, arguments=UNPACKED)
    llm = await asyncio.to_thread(start_llm, settings)
    engine = VllmEngine(llm, skeleton=load_skeleton(settings), end_token_ids=frozenset({3}))
    yield engine, llm
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
class TestSplitModel:
    async def test_every_token_is_scored_by_the_version_that_its_span_names(self, split):
        engine, _ = split
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

    async def test_five_versions_of_changes_leave_what_a_full_set_does(self, split):
        engine, llm = split
        model = build(seed=14)
        await engine.swap_weights(weights_of(model, 20))
        for version in range(21, 26):
            positions = {}
            for name, parameter in model.named_parameters():
                positions[name] = torch.randperm(parameter.numel())[:2].sort().values.numpy()
                parameter.data.view(-1)[positions[name]] += 0.5
            changes = WeightChanges(base_policy_version=version - 1, positions=positions)
            await engine.swap_weights(replace(weights_of(model, version), changes=changes))
        by_changes = await llm.compute_weight_checksums()
        nothing = WeightChanges(base_policy_version=25, positions={})
        await engine.swap_weights(replace(weights_of(build(seed=15), 26), changes=nothing))
        assert await llm.compute_weight_checksums() == by_changes
        await engine.swap_weights(weights_of(model, 27))
        assert await llm.compute_weight_checksums() == by_changes


WORKER = """
import asyncio, json, multiprocessing, os, sys
from pathlib import Path
from tests.fixtures.rollout.models import request_for
from tests.unit.rollout.engines.vllm.tiny_adapters import LORA, make_adapters, version_of
from tests.unit.rollout.engines.vllm.tiny_vllm import build, start


async def sample(folder, num_processes, prompt):
    base = build(seed=1)
    base.save_pretrained(folder)
    engine = await start(folder, lora=LORA, tensor_parallel_size=int(num_processes))
    for version in (1, 2):
        await engine.swap_weights(version_of(make_adapters(base, seed=version), version))
        found = await engine.generate(request_for(json.loads(prompt), max_new_tokens=40))
        (span,) = found.version_spans
        yield [span.policy_version, found.token_ids, found.logprobs]


async def main(pipe, *asked):
    generations = [each async for each in sample(*asked)]
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


ASKED = (str(NUM_PROCESSES), json.dumps(PROMPT))


def test_each_process_takes_its_slice_of_adapters_and_none_outlives_a_killed_worker(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    said, said_by_worker = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, script, str(said_by_worker), tmp_path / "model", *ASKED],
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
