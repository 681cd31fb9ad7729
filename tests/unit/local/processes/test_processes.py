"""The learner of a local run through its restarts."""

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.local.processes.fake_processes import RUN, TIMEOUT_S, Clock, wait_for_end
from vcpo.local.processes.child import ChildProcess, Liveness, answers_health_check, start_child
from vcpo.local.processes.fleet import Fleet, RunFailedError
from vcpo.local.processes.gpus import TooFewGpusError, find_gpus, gpu_bytes, plan_gpus
from vcpo.local.processes.learner import LearnerEnd, LearnerProcess
from vcpo.service.lifecycle import GPU_MEMORY_VARIABLE, Ready, gpu_memory_ratio, write_ready
from vcpo.wire.access.roles import CallerRole
from vcpo.wire.server import WireServer


@pytest.fixture
def learner(fleet: Fleet, clock: Clock) -> LearnerProcess:
    return LearnerProcess(fleet, resume=False, spec=RUN.spec, clock=clock)


@pytest.fixture
def fail(learner, clock, monkeypatch):
    """Starts the learner when it is due and has it end with a status after some steps."""

    def start_and_end(*, step: int, status: int = 1) -> LearnerEnd | None:
        clock.now_s += 60.0
        monkeypatch.setenv("EXIT", str(status))
        learner.start_when_due(0)
        assert learner.ranks
        wait_for_end(learner.ranks[0])
        return learner.take_end(step=step)

    return start_and_end


def test_a_learner_that_ends_with_the_run_completes_it(fail):
    end = fail(step=300, status=0)
    assert (end.is_complete, end.message) == (True, "")


def test_restarts_without_progress_end_the_run_with_the_cause(fail):
    fail(step=0)
    fail(step=0)
    expected = (
        r"^`spec\.failurePolicy\.maxLearnerRestarts`: the learner ended 3 times in a row without"
        r" progress; 2 restarts are allowed\. The last time it ended with status 1: the reason"
    )
    with pytest.raises(RunFailedError, match=expected):
        fail(step=0)


def test_progress_gives_the_restarts_back(fail):
    for step in (10, 20, 30, 40, 50):
        assert fail(step=step).message.endswith("restart 1 of 2 without progress")


def test_steps_taken_again_are_no_progress(fail):
    fail(step=60)
    fail(step=60)
    with pytest.raises(RunFailedError):
        fail(step=60)


def test_the_pause_before_a_restart_is_kept(learner, fail, clock):
    fail(step=0)
    end = fail(step=0)
    assert end.message.endswith("restart 2 of 2 without progress, in 1 s")
    learner.start_when_due(0)
    assert not learner.ranks
    clock.now_s += 1.0
    learner.start_when_due(0)
    assert learner.ranks


def test_each_learner_is_found_ready_once(learner):
    learner.start_when_due(0)
    assert learner.take_ready() is None
    ready = Ready(pid=1, grpc_port=2, metrics_port=3)
    write_ready(learner.ranks[0].ready_file, ready)
    assert learner.take_ready() == ready
    assert learner.take_ready() is None


@pytest.fixture
def child(tmp_path) -> Iterator[ChildProcess]:
    child = start_child(
        "child",
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        log=tmp_path / "log",
        ready_file=tmp_path / "ready",
        environment={},
    )
    yield child
    child.close_stdin()
    child.process.wait(TIMEOUT_S)


@pytest.fixture
def liveness(clock: Clock) -> Liveness:
    return Liveness(startup_deadline_s=1800.0, clock=clock)


def serve_at(child: ChildProcess, port: int) -> None:
    write_ready(child.ready_file, Ready(pid=1, grpc_port=port, metrics_port=1))


def test_silence_counts_from_the_first_question_without_an_answer(liveness, child, clock):
    assert liveness.silent_s(child) == 0.0
    clock.now_s += 500.0  # a host that slept, or asks seldom
    liveness.record(child, answered=False)
    assert liveness.silent_s(child) == 0.0
    clock.now_s += 40.0
    liveness.record(child, answered=False)
    assert liveness.silent_s(child) == 40.0


def test_who_loads_has_the_startup_deadline_and_who_serves_a_minute(liveness, child, clock):
    liveness.record(child, answered=False)
    clock.now_s += 1799.0
    assert not liveness.is_hung(child)
    serve_at(child, 1)
    # The time that it took to load does not count against it.
    liveness.record(child, answered=False)
    assert not liveness.is_hung(child)
    clock.now_s += 60.0
    assert liveness.is_hung(child)


def test_processes_that_ended_are_forgotten(liveness, child, clock):
    liveness.record(child, answered=False)
    clock.now_s += 100.0
    liveness.retain([child])
    assert liveness.silent_s(child) == 100.0
    liveness.retain([])
    assert liveness.silent_s(child) == 0.0


@pytest.fixture
async def server() -> AsyncIterator[WireServer]:
    server = WireServer(keys={CallerRole.STEERING: "secret"})
    yield server
    await server.stop(0)


async def test_a_process_that_serves_answers_whatever_it_says_and_asks_for(server, child):
    serve_at(child, await server.start("127.0.0.1:0", [], serving=False))
    assert await answers_health_check(child, 5.0)


async def test_a_process_without_health_checks_answers_too(child):
    server = grpc.aio.server()
    serve_at(child, server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    assert await answers_health_check(child, 5.0)
    await server.stop(0)


async def test_a_process_that_is_gone_does_not_answer(server, child):
    serve_at(child, await server.start("127.0.0.1:0", []))
    await server.stop(0)
    assert not await answers_health_check(child, 5.0)


def gpus(count):
    return [str(number) for number in range(count)]


def start_workers(plan, num_workers):
    """What workers get that start one after the other."""
    on_gpus = Counter()
    shares = []
    for _ in range(num_workers):
        share = plan.share_for_next_worker(on_gpus)
        on_gpus[share.gpu] += 1
        shares.append(share)
    return shares


counts = st.integers(min_value=1, max_value=16)


@given(num_gpus=counts, max_workers=counts, data=st.data())
def test_what_runs_on_a_gpu_fits_into_it(num_gpus, max_workers, data):
    plan = plan_gpus(gpus(num_gpus), max_workers=max_workers)
    num_workers = data.draw(st.integers(min_value=0, max_value=max_workers))
    wanted = Counter()
    for share in [plan.learner, *start_workers(plan, num_workers)]:
        wanted[share.gpu] += share.memory_ratio or 1.0
    assert all(ratio <= 1.0 for ratio in wanted.values())


@given(num_gpus=st.integers(min_value=2, max_value=16), max_workers=counts)
def test_with_a_second_gpu_the_learner_has_its_own_and_workers_are_spread(num_gpus, max_workers):
    plan = plan_gpus(gpus(num_gpus), max_workers=max_workers)
    assert (plan.learner.gpu, plan.learner.memory_ratio) == ("0", None)
    per_gpu = Counter(share.gpu for share in start_workers(plan, max_workers))
    assert "0" not in per_gpu
    assert (
        max(per_gpu.values()) - (min(per_gpu.values()) if len(per_gpu) == num_gpus - 1 else 0) <= 1
    )
    if max_workers < num_gpus:
        assert set(per_gpu.values()) == {1}
        assert "share" not in plan.description


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "fix"),
    [
        (1, 2, "set it to 1: learner and workers then share the GPU"),
        (2, 2, "set it to at most 1"),
        (8, 8, "set it to at most 7"),
    ],
)
def test_too_few_gpus_for_the_ranks_are_refused_with_both_numbers(num_gpus, num_ranks, fix):
    expected = (
        f"the learner's {num_ranks} ranks need a GPU each and the rollout workers one more, and"
        f" this machine has {num_gpus}; {fix}"
    )
    with pytest.raises(TooFewGpusError) as refused:
        plan_gpus(gpus(num_gpus), max_workers=1, num_ranks=num_ranks)
    assert str(refused.value) == expected


@given(
    num_gpus=st.integers(min_value=2, max_value=16),
    num_ranks=counts,
    size=st.integers(min_value=1, max_value=8),
)
def test_ranks_have_a_gpu_each_and_workers_as_many_as_they_need(num_gpus, num_ranks, size):
    try:
        plan = plan_gpus(gpus(num_gpus), max_workers=2, num_ranks=num_ranks, gpus_per_worker=size)
    except TooFewGpusError:
        assert num_ranks + size > num_gpus
        return
    sets = [share.gpu.split(",") for share in plan.workers]
    used = [gpu for one in [plan.learner.gpu.split(","), *sets] for gpu in one]
    assert len(used) == len(set(used)) == num_ranks + size * len(sets)
    assert {len(one) for one in sets} == {size}
    assert len(sets) == (num_gpus - num_ranks) // size
    assert plan.learner.memory_ratio is None


def test_without_a_gpu_any_number_of_ranks_computes_on_the_cpu():
    assert plan_gpus([], max_workers=1, num_ranks=8).learner is None


def test_a_worker_that_is_replaced_gets_the_gpu_that_is_free():
    plan = plan_gpus(gpus(4), max_workers=3)
    assert plan.share_for_next_worker({"1": 1, "3": 1}).gpu == "2"


def test_one_gpu_is_shared_by_all():
    plan = plan_gpus(gpus(1), max_workers=2)
    assert plan.learner.environment == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0",
        "VCPO_GPU_MEMORY_RATIO": "0.6000",
    }
    assert plan.workers[0].memory_ratio == pytest.approx(0.15)
    assert plan.description == (
        "learner on GPU 0, rollout workers on GPU 0: they share its memory, 0.60 for the learner"
        " and 0.15 for each of 2 workers; with a lower maxReplicas others get more"
    )


def test_what_workers_do_not_need_of_one_gpu_is_the_learners():
    plan = plan_gpus(gpus(1), max_workers=2, worker_ratio=0.09)
    assert plan.workers[0].memory_ratio == 0.09
    assert plan.learner.memory_ratio == pytest.approx(0.72)


@pytest.mark.parametrize(
    ("variable", "identifiers"),
    [("2,0", ["2", "0"]), ("", []), ("-1", []), ("1,-1,0", ["1"]), ("GPU-5f, 1", ["GPU-5f", "1"])],
)
def test_the_users_own_choice_of_gpus_holds(variable, identifiers):
    assert find_gpus({"CUDA_VISIBLE_DEVICES": variable}) == identifiers


@pytest.mark.parametrize(
    ("script", "identifiers"),
    [
        ("printf '0\\n1\\n'", ["0", "1"]),
        ("echo 'No devices were found'", []),
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", []),
    ],
    ids=["GPUs", "none", "a driver that does not answer"],
)
def test_the_driver_is_asked(tmp_path, monkeypatch, script, identifiers):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_gpus({}) == identifiers


def test_the_driver_says_how_large_a_gpu_is(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$2" = --id=GPU-5f ] && echo 81559\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_bytes("GPU-5f") == 81_559 * 2**20
    assert gpu_bytes("7") is None


@pytest.mark.parametrize("given_ratio", ["0", "1.5", "nan", "half", ""])
def test_a_share_that_is_none_is_refused(monkeypatch, given_ratio):
    monkeypatch.setenv(GPU_MEMORY_VARIABLE, given_ratio)
    with pytest.raises(ValueError, match=r"VCPO_GPU_MEMORY_RATIO: must be a share in \(0, 1\]"):
        gpu_memory_ratio()


def test_a_share_is_read_as_it_was_written(monkeypatch):
    monkeypatch.delenv(GPU_MEMORY_VARIABLE, raising=False)
    assert gpu_memory_ratio() is None
    for name, value in plan_gpus(gpus(1), max_workers=1).learner.environment.items():
        monkeypatch.setenv(name, value)
    assert gpu_memory_ratio() == 0.6
