"""A run directory seen from outside: with a learner that answers over gRPC, and without one."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.fixtures.records import evaluation_record, step_record
from vcpo.api import parse_run
from vcpo.local.run_dir import RunDir
from vcpo.monitor.local_run import LocalEvents, LocalRun, LocalRuns, run_directories
from vcpo.records.journal import EventRecord, Journal
from vcpo.service.lifecycle import Ready, write_ready
from vcpo.service.run_lock import LockHolder, is_held, run_lock
from vcpo.wire.access.roles import CallerRole
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import control_pb2, control_pb2_grpc, work_pb2

RUN = parse_run("""
metadata: {name: r}
spec: {model: {name: m}, environment: {name: countdown}, steps: 3}
""")
SIGNALS = control_pb2.Signals(
    phase=work_pb2.RUN_PHASE_RUNNING,
    step=2,
    total_steps=3,
    ess_ratio=0.4,
    on_policy_ess_ratio=0.8,
    batch_trajectories=4,
    lag_limit_steps=3,
    warning_level="warn",
    warning_score=0.4,
    seconds_since_step=7.0,
    workers=[control_pb2.Worker(worker_id="main-0", rollout_group="main")],
)


class Learner(control_pb2_grpc.ControlServiceServicer):
    answers = True

    async def GetSignals(self, request, context):  # noqa: N802 - gRPC's name
        if not self.answers:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return SIGNALS


class Served:
    """A run directory whose host is this process, and its learner."""

    def __init__(self, directory: RunDir, learner: Learner) -> None:
        self.directory = directory
        self.learner = learner
        self.now_s = 1000.0
        self.run = LocalRun(directory.path, clock=lambda: self.now_s)


@pytest.fixture
def directory(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "r-001")
    directory.create(RUN)
    return directory


@pytest.fixture
async def served(directory: RunDir) -> AsyncIterator[Served]:
    learner, server = Learner(), WireServer(keys={CallerRole.STEERING: "secret"})
    control_pb2_grpc.add_ControlServiceServicer_to_server(learner, server.grpc_server)
    port = await server.start("127.0.0.1:0", [])
    directory.write_steering_key("secret")
    for name in ("learner", "main-0", "main-1"):
        write_ready(directory.ready_file(name), Ready(pid=1, grpc_port=port, metrics_port=1))
    with run_lock(directory.path, LockHolder.HOST):
        served = Served(directory, learner)
        yield served
        await served.run.close()
    await server.stop(0)


async def test_a_learner_that_answers_is_shown_as_it_is_now(served):
    view = await served.run.view()
    assert (view.phase, view.signals.step, view.total_steps) == ("running", 2, 3)
    assert (view.signals.relative_ess_ratio, view.signals.warning_level) == (0.5, "warn")
    assert (view.workers_ready, view.workers_desired) == (1, 2)
    assert view.signals.step_age_s == 7.0


async def test_a_learner_that_stops_to_answer_leaves_its_numbers_and_their_age(served):
    await served.run.view()
    served.learner.answers = False
    served.now_s += 31.0
    view = await served.run.view()
    assert (view.phase, view.signals.step) == ("silent", 2)
    assert (view.signals.age_s, view.signals.step_age_s) == (31.0, 38.0)


async def test_a_learner_that_has_never_answered_is_shown_by_its_records(served):
    served.learner.answers = False
    Journal(served.directory.path).step(step_record(step=1, time_unix_s=990.0, warning_level="ok"))
    view = await served.run.view()
    assert (view.phase, view.signals.step, view.signals.step_age_s) == ("silent", 1, 10.0)


async def test_a_run_without_a_learner_yet_is_starting(directory):
    with run_lock(directory.path, LockHolder.HOST):
        view = await LocalRun(directory.path).view()
    assert (view.phase, view.signals.step) == ("starting", 0)


@pytest.mark.parametrize(
    ("rewards", "kind", "phase"),
    [
        ([0.1, 0.5, 0.9], "Complete", "complete"),
        ([0.1, 0.5], "Draining", "stopped"),
        ([0.1, 0.5], "Failed", "failed"),
    ],
)
async def test_a_run_that_is_over_says_how_it_ended(directory, rewards, kind, phase):
    journal = Journal(directory.path)
    for step, reward in enumerate(rewards, 1):
        journal.step(step_record(step=step, time_unix_s=100.0 * step, reward_mean=reward))
    journal.evaluation(evaluation_record(step=1, time_unix_s=50.0, accuracy=0.25))
    journal.event(EventRecord(time_unix_s=400.0, source="host", kind=kind, message="m"))
    view = await LocalRun(directory.path, clock=lambda: 1000.0).view()
    assert (view.phase, view.signals.step, view.signals.reward_mean) == (
        phase,
        len(rewards),
        rewards[-1],
    )
    assert (view.signals.accuracy, view.signals.step_age_s) == (0.25, 1000.0 - 100.0 * len(rewards))


async def test_rows_that_go_on_come_first(directory, served, tmp_path):
    other = RunDir(tmp_path / "a-000")
    other.create(RUN)
    async with LocalRuns([tmp_path], clock=lambda: 1000.0) as source:
        rows = await source.rows()
    assert [(Path(row.place).name, row.view.phase) for row in rows] == [
        ("r-001", "running"),
        ("a-000", "stopped"),
    ]


async def test_events_of_an_opened_run_are_the_last_few_and_then_the_new_ones(directory):
    journal = Journal(directory.path)

    def write(number: int) -> None:
        event = EventRecord(time_unix_s=1.0, source="learner", kind="K", message=str(number))
        journal.event(event)

    for number in range(9):
        write(number)
    source = LocalRuns([directory.path])
    await source.rows()
    place = str(directory.path)
    assert source.new_events(place) == ["K: 5", "K: 6", "K: 7", "K: 8"]
    write(9)
    assert source.new_events(place) == ["K: 9"]
    assert source.new_events(place) == []


def test_a_folder_is_searched_for_runs_and_a_run_is_taken_as_it_is(directory, tmp_path):
    (tmp_path / "notes").mkdir()
    assert run_directories([tmp_path, directory.path]) == [directory.path]
    assert run_directories([tmp_path / "missing"]) == []


async def test_a_directory_whose_spec_is_no_run_is_told_of_and_hides_no_other(directory, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "spec.yaml").write_text("spec: 3")
    source = LocalRuns([tmp_path])
    assert [row.view.run.metadata.name for row in await source.rows()] == ["r"]
    assert "bad" in source.notice()


def test_events_end_with_the_host(directory):
    Journal(directory.path).event(
        EventRecord(time_unix_s=1.0, source="host", kind="Started", message="r")
    )
    events = LocalEvents(directory.path)
    with run_lock(directory.path, LockHolder.HOST):
        assert [event.kind for event in events.read()] == ["Started"]
        assert not events.has_ended()
    assert not events.read()


@pytest.mark.parametrize(
    ("owner", "held"),
    [
        ('{"pid": 4194305, "host": "%s", "since_unix_s": 0}', False),
        ('{"pid": 1, "host": "%s", "since_unix_s": 0}', True),
        ('{"pid": 4194305, "host": "another machine", "since_unix_s": 0}', True),
        ("half a li", False),
    ],
)
def test_a_lock_is_held_while_its_last_holder_may_live(tmp_path, monkeypatch, owner, held):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    (tmp_path / "host.lock").write_text(owner.replace("%s", "here"))
    assert is_held(tmp_path, LockHolder.HOST) is held


def test_nobody_else_reads_the_key(directory):
    directory.write_steering_key("one")
    directory.write_steering_key("two")
    assert directory.read_steering_key() == "two"
    assert stat.S_IMODE(directory.steering_key.stat().st_mode) == 0o600
