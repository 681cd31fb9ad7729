"""Faults that are planted in the product's own parts are found by the judge."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from tests.chaos.answers import ANSWERS, End, Part, Window, unexpected_ends
from tests.chaos.drops import MAY_DROP, Drop, Facts, Granted, Terms, complaint
from tests.chaos.kinds import Kind
from tests.chaos.learner import waiting_ids, watched_apply
from tests.chaos.live_run import LiveRun
from tests.chaos.pace import Pace, Silence
from tests.chaos.recorder import judge, read_lines, write_message
from tests.chaos.wall_clock import WallClock
from tests.chaos.witness import Witness
from tests.fixtures.learner.dispatcher import (
    TIMEOUT_S,
    ManualClock,
    make_ledger,
    make_trajectories,
)
from vcpo.records.reasons import DropReason
from vcpo.wire.trajectory import trajectory_to_message
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger.ledger import TrajectoryLedger

TERMS = Terms(max_policy_lag_steps=4, prompts_per_step=2, group_size=2, lease_timeout_s=TIMEOUT_S)


def encoded(trajectory):
    """A response as a worker's witness writes it down."""
    return write_message(trajectory_to_message(trajectory))


def said_by_worker(*trajectories):
    """What a worker says whose responses were accepted."""
    sent = [
        {"what": "submitted", "id": each.trajectory_id, "message": encoded(each)}
        for each in trajectories
    ]
    ids = [each.trajectory_id for each in trajectories]
    return [*sent, {"what": "confirmed", "ids": ids, "unix_s": 1.0}]


def drop_uncounted(contents, change):
    """Lets go of what a requeued prompt has kept, and counts nothing."""
    contents.requeued = deque(replace(each, accepted={}) for each in contents.requeued)


def drop_as_too_old(contents, change):
    """Takes every kept response for too old."""
    change.oldest_step = change.policy_version + 1


def after_a_restart(ledger, clock):
    """The ledger of the next process."""
    data = [part.SerializeToString() for part in ledger.snapshot().parts()]
    other = make_ledger(clock, incarnation="later")
    other.restore([ledger_pb2.LedgerSnapshot.FromString(part) for part in data])
    other.restart()
    return other


@pytest.mark.parametrize(
    ("plant", "complaints"),
    [
        (None, []),
        (drop_uncounted, ["dropped under no known reason ('')"]),
        (drop_as_too_old, ["dropped as lag_exceeded at step 0, which is not so"]),
    ],
    ids=["sound", "uncounted", "as too old"],
)
def test_a_confirmed_response_that_a_grant_drops_is_found(plant, complaints, tmp_path, monkeypatch):
    grant = TrajectoryLedger._grant

    def planted(self, change):
        if plant is not None:
            plant(self, change)
        return grant(self, change)

    monkeypatch.setattr(TrajectoryLedger, "_grant", planted)
    witness, clock = Witness(tmp_path / "learner", tmp_path / "order"), ManualClock()
    monkeypatch.setattr(TrajectoryLedger, "_apply", watched_apply(witness))
    ledger = make_ledger(clock)
    (lease,) = ledger.grant("w", num_groups=1, policy_version=0)
    first, _ = make_trajectories(lease)
    ledger.submit(lease.lease_id, [first])
    ledger = after_a_restart(ledger, clock)
    ledger.grant("w", num_groups=1, policy_version=0)
    held = sorted(waiting_ids(ledger))
    life = [
        {"what": "published", "version": 0, "digest": "d"},
        *read_lines(tmp_path / "learner"),
        {"what": "ended", "ids": held},
    ]
    verdict = judge([life], [said_by_worker(first)], terms=TERMS)
    assert verdict.lost == []
    assert [each.partition(": ")[2] for each in verdict.wrongly_dropped] == complaints


def test_every_reason_of_the_ledger_is_judged():
    assert MAY_DROP.keys() == set(DropReason)


def facts(**fields):
    """Two leases of two responses each, sampled after 0 steps and after 2."""
    oldest_step = {"l/0": 0, "l/1": 0, "m/0": 2, "m/1": 2}
    granted = {
        "l": Granted(monotonic_s=100.0, number=2, worker="one"),
        "m": Granted(monotonic_s=100.0, number=2, worker="other"),
    }
    return Facts(**{"oldest_step": oldest_step, "granted": granted, **fields})


def complains(reason, *ids, step=0, buffered=(), monotonic_s=100.0, limit=None, of=None):
    drop = Drop(
        ids=ids,
        reason=reason,
        step=step,
        buffered=buffered,
        monotonic_s=monotonic_s,
        limit=limit,
    )
    return complaint(drop, facts() if of is None else of, TERMS) is not None


def test_a_word_that_is_no_reason_of_the_ledger_excuses_nothing():
    assert complains("LeaseGranted", "l/0")


def test_an_expired_lease_drops_what_had_come_of_it_after_its_time():
    assert not complains("lease_expired", "l/0", monotonic_s=110.0)
    assert complains("lease_expired", "l/0", monotonic_s=109.0)


@pytest.mark.parametrize("reason", ["lease_expired", "released", "surplus"])
def test_a_lease_that_brought_all_of_its_responses_cannot_end_without_them(reason):
    assert complains(reason, "l/0", "l/1", monotonic_s=200.0)
    assert not complains(reason, "l/0", monotonic_s=200.0)


def test_a_failed_generation_is_one_that_its_worker_reported():
    assert complains("generation_failed", "l/0")
    assert not complains("generation_failed", "l/0", of=facts(failed={"l"}))


def test_a_group_is_late_if_its_oldest_token_is_beyond_the_limit_at_its_turn():
    assert complains("lag_exceeded", "l/0", "l/1", step=4, buffered=[["l/0", "l/1"]])
    assert not complains("lag_exceeded", "l/0", "l/1", step=5, buffered=[["l/0", "l/1"]])


def test_a_group_is_late_if_two_groups_of_each_step_come_before_it():
    """Step 5 takes the first two groups of version 0, step 6 the third one: too late."""
    groups = [[f"{name}/0"] for name in "abc"]
    of = facts(oldest_step={f"{name}/0": 0 for name in "abc"})
    assert complains("lag_exceeded", "b/0", step=4, buffered=groups, of=of)
    assert not complains("lag_exceeded", "c/0", step=4, buffered=groups, of=of)


def test_a_throttle_drops_what_is_beyond_the_limit_that_the_learner_said():
    """Step 3 takes the group of version 0 next: a lag of 2."""
    throttled = {"step": 2, "buffered": [["l/0", "l/1"]]}
    assert not complains("throttled", "l/0", "l/1", limit=1, **throttled)
    assert complains("throttled", "l/0", "l/1", limit=2, **throttled)
    assert complains("throttled", "l/0", "l/1", limit=None, **throttled)


def test_a_group_is_left_out_after_an_error():
    assert complains("quarantined", "l/0", of=facts())
    assert not complains("quarantined", "l/0", of=facts(broken={"l/0"}))


def test_a_worker_that_was_set_aside_takes_its_own_responses_with_it():
    assert not complains("worker_set_aside", "l/0", of=facts(set_aside={"one"}))
    assert complains("worker_set_aside", "m/0", of=facts(set_aside={"one"}))


def test_a_roll_back_drops_what_older_versions_sampled():
    assert not complains("rolled_back", "m/0", step=3)
    assert complains("rolled_back", "m/0", step=2)


@pytest.mark.parametrize("reason", ["no_signal", "learner_restarted"])
def test_some_reasons_never_drop_what_was_confirmed(reason):
    assert complains(reason, "l/0")


def silence(*, step_s=0.7, start_s=8.0):
    """The silence of a run with usual steps and starts, from second 0 on."""
    return Silence(pace=Pace(steps_s=[step_s] * 9, starts_s=[start_s] * 3), since_s=0.0)


def test_a_hang_of_61_s_is_found_in_a_run_of_usual_steps():
    assert silence().is_hang(61.0, is_starting=False)


def test_a_silence_of_half_a_minute_is_no_hang():
    """A lease of ten seconds that expires, and a pause of fifteen of a disk that is tried again."""
    assert not silence().is_hang(30.0, is_starting=False)


def test_a_start_takes_its_time():
    """40 s and 15 steps of 0.7 s, and 4 starts of 8 s: 82.5 s."""
    assert not silence().is_hang(82.0, is_starting=True)
    assert silence().is_hang(83.0, is_starting=True)


def test_a_loaded_machine_has_a_longer_limit():
    """40 s and 15 steps of 3 s: 85 s."""
    assert not silence(step_s=3.0).is_hang(84.0, is_starting=False)
    assert silence(step_s=3.0).is_hang(86.0, is_starting=False)


def test_a_sign_of_life_ends_a_silence_and_no_sign_makes_it_last():
    heard = silence()
    heard.hear("step 1", 40.0)
    heard.hear("step 1", 45.0)
    assert not heard.is_hang(89.0, is_starting=False)
    assert heard.is_hang(92.0, is_starting=False)


def test_signs_of_life_without_a_new_step_are_a_hang_after_ten_minutes():
    heard = silence()
    for second in range(0, 601, 10):
        heard.hear(second, float(second))
    assert heard.is_hang(601.0, is_starting=True)


def test_before_anything_is_usual_ten_minutes_are_allowed():
    assert not Silence(pace=Pace(steps_s=[0.7]), since_s=0.0).is_hang(599.0, is_starting=False)


class HungLearner:
    """A learner that serves and takes no step: its witness's last line stays the same."""

    def __init__(self, folder):
        self.name, self.ready, self.is_alive = "learner-000", object(), True
        self.witness = folder / "learner"
        self.process = SimpleNamespace(poll=lambda: None)


async def test_a_run_whose_learner_hangs_is_found(tmp_path):
    now_s = [0.0]

    async def pass_time(seconds):
        now_s[0] += seconds

    run = LiveRun(tmp_path, tmp_path, clock=lambda: now_s[0], sleep=pass_time)
    run.pace.steps_s = [0.7] * 9
    run.lives.append(HungLearner(tmp_path))
    Witness(tmp_path / "learner", tmp_path / "order").say("trained", version=7)
    assert not await run.progress()
    assert 50.0 < now_s[0] < 61.0


def test_every_kind_has_an_answer():
    assert ANSWERS.keys() == set(Kind)


def test_a_process_that_ends_though_no_fault_of_its_time_allows_it_is_found():
    windows = [
        Window(kind=Kind.CUT, begun_s=0.0, over_s=10.0),
        Window(kind=Kind.WORKER_KILLED, begun_s=5.0, over_s=10.0),
    ]
    ends = [
        End(name="learner-000", part=Part.LEARNER, status=1, at_s=6.0),
        End(name="main-000", part=Part.WORKER, status=-9, at_s=4.0),
        End(name="main-001", part=Part.WORKER, status=-9, at_s=6.0),
    ]
    found = unexpected_ends(ends, windows)
    assert found == ["learner-000 ended with 1", "main-000 ended with -9"]


def test_the_product_reads_the_clock_that_was_set_and_libraries_read_the_true_one(
    tmp_path, monkeypatch
):
    product, library = ModuleType("vcpo_of_a_test"), ModuleType("grpc_of_a_test")
    for module in (product, library):
        module.time = time
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("tests.chaos.wall_clock._PRODUCT", product.__name__)
    of_process, of_harness = WallClock(tmp_path / "clock"), WallClock(tmp_path / "clock")
    of_process.install()
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert product.time.time() == 1000.0
    of_harness.set_to(-500.0)
    assert product.time.time() == 500.0
    assert product.time.monotonic is time.monotonic
    assert library.time.time() == 1000.0
    assert of_harness.num_readings == 1
