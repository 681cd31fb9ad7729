"""The local host with fake processes of learner and worker that speak the real wire."""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator

import pytest

from tests.fixtures.host import PATIENCE_S, ROOT, RUN, SERVE, HostFixture
from vcpo.api.workloads import RolloutGroup
from vcpo.local.terminal.summary import Ending
from vcpo.records.journal import EventRecord, Journal


@pytest.fixture
async def fixture(request, tmp_path, monkeypatch) -> AsyncIterator[HostFixture]:
    for module in ("vcpo_learner", "vcpo_rollout"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__main__.py").write_text(SERVE, encoding="utf-8")
        (tmp_path / module / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "core"))))
    monkeypatch.setenv("SWITCH", str(tmp_path / "switch"))
    fixture = HostFixture(tmp_path, getattr(request, "param", RUN))
    yield fixture
    if fixture.running is not None:
        fixture.running.cancel()
        await asyncio.gather(fixture.running, return_exceptions=True)
    fixture.endpoint.close()


@pytest.fixture
def one_gpu(tmp_path, monkeypatch) -> None:
    """A machine whose driver knows of one."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


async def test_a_learner_killed_while_it_starts_is_started_again(fixture):
    fixture.tell("stall")
    fixture.start()
    await fixture.until(fixture.switch.with_suffix(".stalls").exists)
    fixture.unsay("stall")
    os.kill(fixture.host._fleet.learner_ranks[0].process.pid, signal.SIGKILL)
    await fixture.until_answered("learner")
    (restarted,) = fixture.events("LearnerRestarted")
    assert restarted.startswith("it was killed by SIGKILL")
    assert restarted.endswith("restart 1 of 3 without progress")
    fixture.tell("complete")
    assert (await fixture.outcome()).ending is Ending.COMPLETE


async def test_a_worker_that_cannot_start_ends_the_run_before_the_learner_serves(fixture):
    fixture.tell("stall")
    fixture.tell("refused")
    fixture.start()
    outcome = await fixture.outcome()
    assert outcome.ending is Ending.FAILED
    assert outcome.message == "main-0 cannot start: no license"
    assert fixture.events("LearnerStarted") == []


@pytest.mark.usefixtures("one_gpu")
async def test_a_worker_on_the_learners_gpu_starts_after_it(fixture):
    fixture.tell("stall")
    fixture.start()
    await fixture.until(fixture.switch.with_suffix(".stalls").exists)
    for _ in range(2):
        views = len(fixture.view.views)
        await fixture.until(lambda seen=views: len(fixture.view.views) > seen + 1)
    assert not fixture.host._fleet.workers["main"]
    fixture.unsay("stall")
    os.kill(fixture.host._fleet.learner_ranks[0].process.pid, signal.SIGKILL)
    await fixture.until(lambda: fixture.host._fleet.workers["main"])


KNOWN = RolloutGroup(name="main", engine="vllm", kvCacheGibibytes=1)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    "fixture",
    [RUN.model_copy(update={"spec": RUN.spec.model_copy(update={"rollouts": (KNOWN,)})})],
    indirect=True,
)
async def test_a_worker_that_measures_no_memory_starts_beside_the_learner_on_its_gpu(fixture):
    fixture.tell("stall")
    fixture.start()
    await fixture.until(lambda: fixture.host._fleet.workers["main"])
    assert fixture.events("LearnerStarted") == []


async def test_the_startup_deadline_acts_while_a_learner_is_stopped_before_it_serves(fixture):
    fixture.tell("stall")
    fixture.start()
    await fixture.until(fixture.switch.with_suffix(".stalls").exists)
    os.kill(fixture.host._fleet.learner_ranks[0].process.pid, signal.SIGSTOP)
    fixture.clock.added_s = 1801.0
    outcome = await fixture.outcome()
    assert outcome.ending is Ending.FAILED
    assert fixture.view.views[-1].phase == "failed"
    assert "`spec.startupDeadlineSeconds`: the run took no step within 1800 s." in outcome.message


async def test_the_startup_deadline_does_not_act_on_a_run_that_starts_over(fixture):
    fixture.tell("forgets")
    fixture.start()
    first = await fixture.until_answered("learner")
    await fixture.until(lambda: fixture.view.views[-1].signals.step == 20)
    os.kill(first, signal.SIGKILL)
    await fixture.until(lambda: fixture.view.views[-1].signals.step == 0)
    fixture.clock.added_s = 1801.0
    views = len(fixture.view.views)
    await fixture.until(lambda: len(fixture.view.views) > views + 1)
    assert fixture.events("Failed") == []
    assert len(fixture.events("LearnerRestarted")) == 1


async def test_a_run_is_not_complete_when_somebody_ends_its_learner(fixture):
    fixture.start()
    first = await fixture.until_answered("learner")
    os.kill(first, signal.SIGTERM)
    await fixture.until(lambda: fixture.events("LearnerRestarted"))
    await fixture.until(lambda: fixture.pid_of("learner") not in {None, first})
    assert fixture.events("LearnerRestarted") == [
        "it was stopped from outside this run; restart 1 of 3 without progress"
    ]
    fixture.tell("complete")
    assert (await fixture.outcome()).ending is Ending.COMPLETE
    assert fixture.directory.log("learner").read_text() == "fresh\nresumed\n"


async def test_a_learner_that_hangs_is_killed_and_started_again(fixture):
    fixture.start()
    first = await fixture.until_answered("learner")
    os.kill(first, signal.SIGSTOP)
    views = len(fixture.view.views)
    await fixture.until(lambda: len(fixture.view.views) > views + 1)
    assert fixture.events("LearnerRestarted") == []
    fixture.clock.added_s = 61.0
    await fixture.until(lambda: fixture.events("LearnerRestarted"))
    (restarted,) = fixture.events("LearnerRestarted")
    assert re.match(r"it did not answer for \d\d+ s and was killed \(log: ", restarted)
    await fixture.until(lambda: fixture.sample("vcpo_run_learner_restarts_total") == 1.0)
    (stale,) = fixture.events("SignalsStale")
    assert re.match(
        r"the newest signals of the learner are \d\d+ s old \(deadline exceeded.*\): lag limit and"
        " workers stay as they are",
        stale,
    )
    # What was shown meanwhile says how old it is.
    assert max(view.signals.age_s for view in fixture.view.views) >= 61.0
    await fixture.until(lambda: fixture.pid_of("learner") not in {None, first})
    await fixture.until(lambda: fixture.view.views[-1].signals.age_s < 10.0)
    (fresh,) = fixture.events("SignalsFresh")
    assert re.match(r"the learner answers again after \d\d+ s", fresh)


async def test_a_learner_that_fails_to_tell_its_signals_lives(fixture):
    fixture.start()
    first = await fixture.until_answered("learner")
    fixture.tell("fails")
    for _ in range(2):
        fixture.clock.added_s += 61.0
        views = len(fixture.view.views)
        await fixture.until(lambda seen=views: len(fixture.view.views) > seen + 1)
    assert fixture.view.views[-1].signals.age_s >= 61.0
    assert fixture.events("LearnerRestarted") == []
    assert fixture.pid_of("learner") == first
    fixture.unsay("fails")
    await fixture.until(lambda: fixture.view.views[-1].signals.age_s < 10.0)


async def test_a_hung_worker_is_replaced_and_an_answer_that_got_old_meanwhile_is_no_silence(
    fixture,
):
    fixture.start()
    await fixture.until_answered("learner")
    os.kill(await fixture.until_answered("main-0"), signal.SIGSTOP)
    views = len(fixture.view.views)
    await fixture.until(lambda: len(fixture.view.views) > views + 1)
    # The learner has just answered; the host still waits for the worker.
    await fixture.until(lambda: fixture.host._signals.age_s < 0.2)
    fixture.clock.added_s = 61.0
    await fixture.until(lambda: fixture.pid_of("main-1"))
    (lost,) = fixture.events("WorkerLost")
    assert re.match(r"main-0 did not answer for \d\d+ s and was killed \(log: ", lost)
    assert fixture.events("SignalsStale") == []


async def test_a_learner_is_told_why_it_is_throttled(fixture):
    fixture.tell("sick")  # its mean ESS ratio is 0.05, half of the floor
    fixture.start()
    told = fixture.switch.with_suffix(".throttled")
    await fixture.until(lambda: told.exists() and told.read_text())
    assert told.read_text() == "the ESS ratio is 5.0% of the on-policy ratio"


async def test_the_host_exports_what_it_knows_of_the_run(fixture):
    fixture.start()
    await fixture.until_answered("main-0")
    await fixture.until(lambda: fixture.sample("vcpo_run_admission_lag_steps") == 8.0)
    info = {"model": "m", "environment": "countdown", "method": "vcpo2", "owner": "", "team": ""}
    assert fixture.sample("vcpo_run_info", **info) == 1.0
    assert fixture.sample("vcpo_run_steps") == 300.0
    ready = {"group": "main", "state": "ready"}
    await fixture.until(lambda: fixture.sample("vcpo_run_replicas", **ready) == 1.0)
    assert fixture.sample("vcpo_run_signals_age_seconds") < PATIENCE_S
    fresh = {"condition": "SignalsFresh", "reason": "Fresh"}
    assert fixture.sample("vcpo_run_condition_reason", **fresh) == 1.0
    assert fixture.sample("vcpo_run_learner_restarts_total") == 0.0
    # The learner of this fixture has taken 20 steps when it is first asked.
    assert fixture.sample("vcpo_run_startup_deadline_timestamp_seconds") is None
    started_s = fixture.sample("vcpo_run_start_timestamp_seconds")
    assert abs(started_s - time.time()) < PATIENCE_S


async def test_what_the_learner_writes_down_is_shown(fixture):
    fixture.start()
    await fixture.until_answered("learner")
    Journal(fixture.directory.path).event(
        EventRecord(time_unix_s=1.0, source="learner", kind="Warning", message="batch: small")
    )
    await fixture.until(lambda: "Warning: batch: small" in fixture.view.events)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_an_interrupted_run_ends_with_nobody_left(fixture, number):
    fixture.start()
    pids = [await fixture.until_answered("learner"), await fixture.until_answered("main-0")]
    os.kill(os.getpid(), number)
    assert (await fixture.outcome()).ending is Ending.INTERRUPTED
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def interrupted_in_a_long_step(fixture: HostFixture) -> list[int]:
    """Interrupt a run whose learner does not end; return the pids of learner and worker."""
    fixture.tell("slow")
    fixture.start()
    pids = [await fixture.until_answered("learner"), await fixture.until_answered("main-0")]
    os.kill(os.getpid(), signal.SIGINT)
    await fixture.until(lambda: fixture.view.views[-1].drain_s is not None)
    return pids


async def test_an_interrupt_waits_for_the_step_as_long_as_the_spec_allows(fixture):
    learner, _ = await interrupted_in_a_long_step(fixture)
    assert fixture.events("Draining") == [
        (
            "the learner finishes its step and saves a checkpoint, within 120 s"
            " (spec.learner.drainSeconds); press Ctrl-C again to stop at once"
        )
    ]
    os.kill(os.getpid(), signal.SIGHUP)  # the user goes home and closes the terminal
    fixture.clock.added_s = 100.0
    await fixture.until(lambda: fixture.view.views[-1].drain_s >= 100.0)
    shown = fixture.view.views[-1]
    assert (shown.phase, shown.signals.step) == ("draining", 20)
    assert fixture.events("DrainTimedOut") == []
    os.kill(learner, signal.SIGTERM)  # now it has finished
    assert (await fixture.outcome()).ending is Ending.INTERRUPTED
    assert fixture.events("DrainTimedOut") == []


async def test_a_learner_that_needs_longer_is_ended_and_that_is_told(fixture):
    pids = await interrupted_in_a_long_step(fixture)
    fixture.clock.added_s = 120.0
    assert (await fixture.outcome()).ending is Ending.INTERRUPTED
    assert fixture.events("DrainTimedOut") == [
        (
            "the learner did not end within 120 s and is stopped now;"
            " spec.learner.drainSeconds sets how long it may take"
        )
    ]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_second_interrupt_stops_at_once_and_says_what_is_lost(fixture):
    pids = await interrupted_in_a_long_step(fixture)
    os.kill(os.getpid(), signal.SIGINT)
    assert (await fixture.outcome()).ending is Ending.INTERRUPTED
    assert fixture.events("Killed") == [
        (
            "interrupted twice: the processes are killed without a checkpoint; step 21, if it has"
            " begun, and 0 responses in flight are lost"
        )
    ]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_learner_that_fails_to_save_is_told_with_the_cause(fixture):
    fixture.tell("dies")
    fixture.start()
    await fixture.until_answered("learner")
    os.kill(os.getpid(), signal.SIGINT)
    assert (await fixture.outcome()).ending is Ending.INTERRUPTED
    (told,) = fixture.events("DrainFailed")
    assert told.startswith("the learner ended with status 1 ")
