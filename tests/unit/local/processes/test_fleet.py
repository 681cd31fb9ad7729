"""The fleet of a run, with fake processes under the module names of learner and worker."""

import json
import signal

import pytest

from tests.unit.local.processes.fake_processes import RUN, TIMEOUT_S, wait_for_end
from vcpo.local.processes.child import ChildProcess
from vcpo.local.processes.fleet import Fleet, RunFailedError
from vcpo.wire.access.roles import RUN_ROLES


def names(children: list[ChildProcess]) -> list[str]:
    return [child.name for child in children]


def read_launch(child: ChildProcess) -> dict[str, list[str] | dict[str, str]]:
    """The arguments and the environment of a fake process that has ended."""
    return json.loads(wait_for_end(child).log.read_text().splitlines()[0])


def start_dying_worker(
    fleet: Fleet, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> ChildProcess:
    monkeypatch.setenv("EXIT", str(exit_code))
    fleet.scale({"main": 1}, 7600, {})
    monkeypatch.delenv("EXIT")
    return wait_for_end(fleet.workers["main"][0])


def keys_of(process):
    """Keys that a process was started with, by role."""
    environment = read_launch(process)["environment"]
    return {role: environment[role.variable] for role in RUN_ROLES}


class TestCommands:
    @pytest.mark.usefixtures("fleet")  # for its fake processes
    def test_the_learner_runs_the_module_that_the_host_was_given(self, run_dir, monkeypatch):
        monkeypatch.setenv("EXIT", "0")
        fleet = Fleet(RUN, run_dir, learner_module="no_such_learner")
        learner = wait_for_end(fleet.start_learner(resume=False)[0])
        learner.close_stdin()
        assert "No module named no_such_learner" in learner.log.read_text()

    def test_a_resumed_learner_keeps_its_port(self, fleet, monkeypatch):
        monkeypatch.setenv("EXIT", "0")
        arguments = read_launch(fleet.start_learner(resume=True, port=7600)[0])["arguments"]
        assert {"--listen=127.0.0.1:7600", "--resume"} <= set(arguments)

    def test_a_worker_is_given_its_name_its_group_and_its_learner(self, fleet, monkeypatch):
        monkeypatch.setenv("EXIT", "0")
        fleet.scale({"main": 1}, 7600, {})
        arguments = read_launch(fleet.workers["main"][0])["arguments"]
        expected = {"--learner=127.0.0.1:7600", "--group=main", "--worker-id=main-0"}
        assert expected <= set(arguments)

    def test_each_process_holds_the_keys_of_its_roles_alone(self, fleet, monkeypatch):
        monkeypatch.setenv("EXIT", "0")
        monkeypatch.setenv("VCPO_STEERING_KEY", "that of the shell")
        learner = keys_of(fleet.start_learner(resume=False)[0])
        fleet.scale({"main": 1}, 7600, {})
        worker = keys_of(fleet.workers["main"][0])
        assert worker["steering"] == ""
        assert learner["steering"] == fleet.steering_key
        assert learner["worker"] == worker["worker"]
        assert len({*learner.values(), *worker.values()}) == 3  # two keys, and none

    @pytest.mark.usefixtures("fleet")  # for its fake processes
    def test_each_process_has_its_gpu(self, run_dir, monkeypatch):
        monkeypatch.setenv("EXIT", "0")
        fleet = Fleet(RUN, run_dir, gpus=["0", "1", "2"])
        (learner,) = fleet.start_learner(resume=False)
        fleet.scale({"main": 1, "other": 1}, 7600, {})
        processes = [learner, *fleet.workers["main"], *fleet.workers["other"]]
        shown = [read_launch(each)["environment"]["CUDA_VISIBLE_DEVICES"] for each in processes]
        for each in processes:
            each.close_stdin()
        assert shown == ["0", "1", "2"]

    def test_threads_are_those_of_the_run(self, fleet, monkeypatch):
        monkeypatch.setenv("EXIT", "0")
        fleet.scale({"main": 1, "other": 1}, 7600, {})
        started = [*fleet.start_learner(resume=False)]
        started += [fleet.workers["main"][0], fleet.workers["other"][0]]
        threads = [read_launch(child)["environment"].get("OMP_NUM_THREADS") for child in started]
        assert threads == ["5", "2", None]


class TestScaling:
    def test_each_group_gets_as_many_workers_as_wanted(self, fleet):
        fleet.scale({"main": 2, "other": 1}, 7600, {})
        assert names(fleet.workers["main"]) == ["main-0", "main-1"]
        assert names(fleet.workers["other"]) == ["other-2"]

    def test_the_idlest_leaves_first(self, fleet):
        fleet.scale({"main": 3}, 7600, {})
        fleet.scale({"main": 1}, 7600, {"main-0": 3, "main-1": 9})
        assert names(fleet.workers["main"]) == ["main-1"]

    def test_a_worker_that_was_asked_to_leave_is_not_lost(self, fleet):
        fleet.scale({"main": 1}, 7600, {})
        (leaving,) = fleet.children
        fleet.scale({"main": 0}, 7600, {})
        wait_for_end(leaving)
        assert fleet.reap() == []
        assert fleet.children == []


class TestReaping:
    def test_a_worker_that_failed_is_lost_once(self, fleet, monkeypatch):
        start_dying_worker(fleet, 1, monkeypatch)
        assert [lost.child.name for lost in fleet.reap()] == ["main-0"]
        assert fleet.reap() == []

    def test_a_worker_that_ended_in_good_order_is_forgotten(self, fleet, monkeypatch):
        start_dying_worker(fleet, 0, monkeypatch)
        assert fleet.reap() == []
        assert fleet.children == []

    def test_what_the_user_must_put_right_ends_the_run_with_the_reason(self, fleet, monkeypatch):
        start_dying_worker(fleet, 2, monkeypatch)
        with pytest.raises(RunFailedError, match=r"main-0 cannot start: the reason"):
            fleet.reap()

    def test_the_fifth_worker_in_a_row_to_fail_ends_the_run_with_the_reason(
        self, fleet, clock, monkeypatch
    ):
        for number in range(4):
            start_dying_worker(fleet, 1, monkeypatch)
            (lost,) = fleet.reap()
            assert lost.pause_s == [0, 1, 2, 4][number]
            clock.now_s += 1000  # however slowly they fail
        start_dying_worker(fleet, 1, monkeypatch)
        expected = (
            r"5 workers in a row ended before they submitted a trajectory; the last one, main-4, "
            r"ended with status 1: the reason \(log: "
        )
        with pytest.raises(RunFailedError, match=expected):
            fleet.reap()

    def test_a_group_whose_workers_fail_waits_before_it_starts_another(
        self, fleet, clock, monkeypatch
    ):
        for _ in range(2):
            start_dying_worker(fleet, 1, monkeypatch)
            fleet.reap()
        fleet.scale({"main": 1, "other": 1}, 7600, {})
        assert [names(group) for group in fleet.workers.values()] == [[], ["other-2"]]
        clock.now_s += 1.0
        fleet.scale({"main": 1}, 7600, {})
        assert names(fleet.workers["main"]) == ["main-3"]

    def test_a_worker_that_delivered_did_not_crash_loop(self, fleet, monkeypatch):
        for number in range(7):
            start_dying_worker(fleet, 1, monkeypatch)
            fleet.record_productive([f"main-{number}"])
            (lost,) = fleet.reap()
            assert lost.pause_s == 0

    def test_no_run_ends_while_one_worker_delivers(self, fleet, clock, monkeypatch):
        fleet.scale({"other": 1}, 7600, {})
        fleet.record_productive(["other-0"])
        for _ in range(7):
            start_dying_worker(fleet, 1, monkeypatch)
            assert len(fleet.reap()) == 1
            clock.now_s += 60.0


class TestEnding:
    async def test_stopping_leaves_nobody(self, fleet):
        children = [*fleet.start_learner(resume=False)]
        fleet.scale({"main": 2}, 7600, {})
        children += fleet.workers["main"]
        await fleet.stop(TIMEOUT_S)
        assert [child.exit_code for child in children] == [-signal.SIGTERM] * 3

    async def test_nothing_of_a_learner_that_was_replaced_stays_open(self, fleet, monkeypatch):
        monkeypatch.setenv("EXIT", "1")
        first = wait_for_end(fleet.start_learner(resume=False)[0])
        fleet.start_learner(resume=True)
        assert first.process.stdin.closed
