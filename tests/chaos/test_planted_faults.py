"""Faults that are planted in the product's own parts are found by the judge."""

import random
import re
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest
import torch
import xxhash
from safetensors.torch import save

from tests.chaos import live_run, wire_faults
from tests.chaos.answers import ANSWERS, End, Part, Window, unexpected_ends
from tests.chaos.drops import MAY_DROP, Drop, Facts, Granted, Terms, complaint
from tests.chaos.kinds import Kind
from tests.chaos.learner import digest_of, waiting_ids, watched_apply, watched_rollback
from tests.chaos.live_run import SPEC, LiveRun
from tests.chaos.pace import Pace, Silence
from tests.chaos.recorder import judge, read_lines, write_message
from tests.chaos.records import wrong_export, wrong_rollbacks, wrong_steps_sent
from tests.chaos.steps import TOLERANCE, StepCheck
from tests.chaos.witness import Witness
from tests.fixtures.learner.dispatcher import TIMEOUT_S, ManualClock, make_ledger, make_trajectories
from tests.fixtures.records import STEP
from vcpo.algo.health.guards import RateBackoff
from vcpo.api import load_run
from vcpo.api.tracking import Sink, SinkName
from vcpo.records.journal import Journal
from vcpo.records.reasons import DropReason
from vcpo.tracking.follow import follow
from vcpo.tracking.sink import TrackedRun, open_sink
from vcpo.tracking.tensorboard import TensorBoardSink
from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan, trajectory_to_message
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.checkpoints.folder import CheckpointFolder, state_bytes
from vcpo_learner.ledger.ledger import TrajectoryLedger
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer
from vcpo_learner.ranks.ranks import RankEnvironment
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks
from vcpo_learner.training.recovery import Rollback
from vcpo_learner.update.policy_update import PolicyUpdate

TERMS = Terms(max_policy_lag_steps=4, prompts_per_step=2, group_size=2, lease_timeout_s=TIMEOUT_S)


def encoded(trajectory):
    """A response as a worker's witness writes it down."""
    return write_message(trajectory_to_message(trajectory))


def drop_uncounted(contents, change):
    """Lets go of what a requeued prompt has kept, and counts nothing."""
    contents.requeued = deque(replace(each, accepted={}) for each in contents.requeued)


@pytest.mark.parametrize(
    ("plant", "complaints"),
    [
        (None, []),
        (drop_uncounted, ["dropped under no known reason ('')"]),
        (
            lambda _, change: setattr(change, "oldest_step", 1),
            ["dropped as lag_exceeded at step 0, which is not so"],
        ),
    ],
    ids=["sound", "uncounted", "as too old"],
)
def test_a_confirmed_response_that_a_grant_drops_is_found(plant, complaints, tmp_path, monkeypatch):
    grant = TrajectoryLedger._grant

    def planted(self, change):
        plant(self, change)
        return grant(self, change)

    monkeypatch.setattr(TrajectoryLedger, "_grant", planted if plant else grant)
    witness, clock = Witness(tmp_path / "learner", tmp_path / "order"), ManualClock()
    monkeypatch.setattr(TrajectoryLedger, "_apply", watched_apply(witness))
    ledger = make_ledger(clock)
    (lease,) = ledger.grant("w", num_groups=1, policy_version=0)
    first, _ = make_trajectories(lease)
    ledger.submit(lease.lease_id, [first])
    data = [part.SerializeToString() for part in ledger.snapshot().parts()]
    ledger = make_ledger(clock, incarnation="later")
    ledger.restore([ledger_pb2.LedgerSnapshot.FromString(part) for part in data])
    ledger.restart()
    ledger.grant("w", num_groups=1, policy_version=0)
    life = [
        {"what": "published", "version": 0, "digest": "d"},
        *read_lines(tmp_path / "learner"),
        {"what": "ended", "ids": sorted(waiting_ids(ledger))},
    ]
    worker = [
        {"what": "submitted", "id": first.trajectory_id, "message": encoded(first)},
        {"what": "confirmed", "ids": [first.trajectory_id], "unix_s": 1.0},
    ]
    verdict = judge([life], [worker], terms=TERMS)
    assert verdict.lost == []
    assert [each.partition(": ")[2] for each in verdict.wrongly_dropped] == complaints


def test_every_reason_and_every_kind_is_judged():
    assert MAY_DROP.keys() == set(DropReason)
    assert ANSWERS.keys() == set(Kind)


OF_LEASES = {"l": Granted(monotonic_s=100.0, number=2, worker="one")}
OF_LEASES["m"] = replace(OF_LEASES["l"], worker="other")
ALL_OF_ONE = [["l/0", "l/1"]]
THREE_GROUPS = [["a/0"], ["b/0"], ["c/0"]]
"""Step 5 takes the first two groups of version 0, step 6 the third one: too late."""


@pytest.mark.parametrize(
    ("reasons", "ids", "drop", "facts", "is_found"),
    [
        ("unheard_of no_signal learner_restarted", "l/0", {}, {}, True),
        ("generation_failed quarantined", "l/0", {}, {}, True),
        ("generation_failed quarantined", "l/0", {}, {"failed": {"l"}, "broken": {"l/0"}}, False),
        ("lease_expired", "l/0", {"monotonic_s": 109.0}, {}, True),
        ("lease_expired", "l/0", {"monotonic_s": 110.0}, {}, False),
        ("lease_expired released surplus", "l/0 l/1", {"monotonic_s": 200.0}, {}, True),
        ("lease_expired released surplus", "l/0", {"monotonic_s": 200.0}, {}, False),
        ("lag_exceeded", "l/0 l/1", {"step": 4, "buffered": ALL_OF_ONE}, {}, True),
        ("lag_exceeded", "l/0 l/1", {"step": 5, "buffered": ALL_OF_ONE}, {}, False),
        ("lag_exceeded", "b/0", {"step": 4, "buffered": THREE_GROUPS}, {}, True),
        ("lag_exceeded", "c/0", {"step": 4, "buffered": THREE_GROUPS}, {}, False),
        ("throttled", "l/0 l/1", {"step": 2, "buffered": ALL_OF_ONE, "limit": 1}, {}, False),
        ("throttled", "l/0 l/1", {"step": 2, "buffered": ALL_OF_ONE, "limit": 2}, {}, True),
        ("throttled", "l/0 l/1", {"step": 2, "buffered": ALL_OF_ONE}, {}, True),
        ("worker_set_aside", "l/0", {}, {"set_aside": {"one"}}, False),
        ("worker_set_aside", "m/0", {}, {"set_aside": {"one"}}, True),
        ("rolled_back", "m/0", {"step": 3}, {}, False),
        ("rolled_back", "m/0", {"step": 2}, {}, True),
    ],
)
def test_a_reason_excuses_a_drop_only_where_it_is_true(reasons, ids, drop, facts, is_found):
    drop = {"step": 0, "buffered": (), "monotonic_s": 100.0, "limit": None, **drop}
    oldest_step = {"l/0": 0, "l/1": 0, "m/0": 2, "m/1": 2, "a/0": 0, "b/0": 0, "c/0": 0}
    of = Facts(oldest_step=oldest_step, granted=OF_LEASES, **facts)
    for reason in reasons.split():
        found = complaint(Drop(ids=tuple(ids.split()), reason=reason, **drop), of, TERMS)
        assert (found is not None) == is_found, reason


@pytest.mark.parametrize(
    ("steps_s", "starts_s", "is_starting", "ok_s", "hang_s"),
    [
        ([0.7] * 9, [8.0] * 3, False, 30.0, 61.0),
        ([0.7] * 9, [8.0] * 3, True, 82.0, 83.0),
        ([3.0] * 9, [8.0] * 3, False, 84.0, 86.0),
        ([0.7], [], False, 599.0, 601.0),
    ],
    ids=["usual", "start: 40 s, 15 steps, 4 starts", "40 s, 15 steps of 3 s", "nothing is usual"],
)
def test_a_silence_beyond_what_is_usual_is_a_hang(steps_s, starts_s, is_starting, ok_s, hang_s):
    silence = Silence(pace=Pace(steps_s=steps_s, starts_s=starts_s), since_s=0.0)
    assert not silence.is_hang(ok_s, is_starting=is_starting)
    assert silence.is_hang(hang_s, is_starting=is_starting)


def test_a_new_sign_of_life_ends_a_silence_for_ten_minutes_at_most():
    heard = Silence(pace=Pace(steps_s=[0.7] * 9, starts_s=[8.0] * 3), since_s=0.0)
    heard.hear("step 1", 40.0)
    heard.hear("step 1", 45.0)
    assert not heard.is_hang(89.0, is_starting=False)
    assert heard.is_hang(92.0, is_starting=False)
    for second in range(100, 601, 10):
        heard.hear(second, float(second))
    assert heard.is_hang(601.0, is_starting=True)


async def test_a_run_whose_learner_serves_and_takes_no_step_is_found(tmp_path):
    now_s = [0.0]

    async def pass_time(seconds):
        now_s[0] += seconds

    run = LiveRun(tmp_path, tmp_path, clock=lambda: now_s[0], sleep=pass_time)
    run.pace.steps_s = [0.7] * 9
    process = SimpleNamespace(poll=lambda: None)
    learner = {"name": "learner-000", "ready": object(), "is_alive": True, "process": process}
    run.lives.append(SimpleNamespace(**learner, witness=tmp_path / "learner"))
    Witness(tmp_path / "learner", tmp_path / "order").say("trained", version=7)
    assert not await run.progress()
    assert 50.0 < now_s[0] < 61.0


def test_a_process_that_ends_though_no_fault_of_its_time_allows_it_is_found():
    cut = Window(kind=Kind.CUT, begun_s=0.0, over_s=10.0)
    windows = [cut, Window(kind=Kind.WORKER_KILLED, begun_s=5.0, over_s=10.0)]
    ends = [
        End(name="learner-000", part=Part.LEARNER, status=1, at_s=6.0),
        End(name="main-000", part=Part.WORKER, status=-9, at_s=4.0),
        End(name="main-001", part=Part.WORKER, status=-9, at_s=6.0),
    ]
    assert unexpected_ends(ends, windows) == ["learner-000 ended with 1", "main-000 ended with -9"]


def responses(model, version):
    """A batch of 8 prompts with 4 responses each, which the model itself might have sampled."""
    draw = random.Random(version)
    for group in range(8):
        prompt = [draw.randrange(3, 20) for _ in range(3)]
        for number in range(4):
            tokens = [draw.randrange(3, 20) for _ in range(5)]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, 2:-1]
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens)[:, None])
            yield Trajectory(
                trajectory_id=f"train-{version}-{group}/{number}",
                prompt_token_ids=tuple(prompt),
                response_token_ids=tuple(tokens),
                rollout_logprobs=tuple(logprobs[:, 0].tolist()),
                version_spans=(VersionSpan(policy_version=version, num_tokens=5),),
                reward=draw.random(),
                finish_reason=FinishReason.STOP,
            )


class RecordedRun:
    """A learner that takes steps in this process, and what is recorded of them."""

    def __init__(self, folder):
        self.folder, self.sent = folder, {}
        (folder / "payloads").mkdir()
        (folder / "run.yaml").write_text(SPEC)
        self.run = load_run(folder / "run.yaml")
        self.policy = PolicyOnRanks.load(self.run.spec, RankEnvironment())
        self.witness = Witness(folder / "learner", folder / "order")

    def take(self, version):
        batch = list(responses(self.policy.model, version))
        self.sent |= {each.trajectory_id: encoded(each) for each in batch}
        groups = [batch[start : start + 4] for start in range(0, 32, 4)]
        result = self.policy.update.step(groups, policy_version=version)
        content = [(each.trajectory_id, digest_of(each)) for each in batch]
        said = {"content": content, "fresh": [], "rate": result.learning_rate_backoff}
        self.witness.say("trained", version=version, **said)
        self.publish(version + 1)

    def publish(self, version):
        weights = {name: each.detach() for name, each in self.policy.model.named_parameters()}
        payload = save(weights)
        digest = xxhash.xxh3_64_hexdigest(payload)
        (self.folder / "payloads" / f"{version}-{digest}.safetensors").write_bytes(payload)
        self.witness.say("published", version=version, digest=digest)

    def save(self, step):
        folder, update = CheckpointFolder(self.folder / "checkpoints", self.run), self.policy.update
        with folder.writing(step) as partial:
            folder.complete(
                partial,
                step=step,
                tensors=update.save_tensors(partial / "tensors").result(),
                update_state=state_bytes(update.state_dict()),
                ledger=[ledger_pb2.LedgerSnapshot()],
            )


@pytest.mark.parametrize("is_planted", [False, True], ids=["sound", "steps twice"])
def test_an_optimizer_that_steps_twice_on_each_batch_is_found(is_planted, tmp_path, monkeypatch):
    step = PolicyOptimizer.step
    if is_planted:
        monkeypatch.setattr(PolicyOptimizer, "step", lambda *each: (step(*each), step(*each)))
    recorded = RecordedRun(tmp_path)
    recorded.take(0)
    recorded.save(1)
    check = StepCheck(*(tmp_path / each for each in ("run.yaml", "checkpoints", "payloads", "own")))
    check.look([tmp_path / "learner"], recorded.sent.get)
    recorded.take(1)
    check.look([tmp_path / "learner"], recorded.sent.get)
    assert (check.num_checked, len(check.wrong)) == (1, int(is_planted))
    assert check.farthest > 5 * TOLERANCE if is_planted else check.farthest < TOLERANCE / 100


def lose_a_step(monkeypatch):
    step = TensorBoardSink.step
    monkeypatch.setattr(
        TensorBoardSink, "step", lambda self, each: each.step == 2 or step(self, each)
    )


def show_what_a_restart_undid(monkeypatch):
    monkeypatch.setattr(TensorBoardSink, "_void_from", lambda *_: None)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda _: None, []),
        (lose_a_step, ["step 2: TensorBoard None, journal 0.25"]),
        (show_what_a_restart_undid, ["step 4: TensorBoard 0.25, journal None"]),
    ],
    ids=["sound", "a step is lost", "a step is undone"],
)
def test_a_tracking_service_that_shows_other_steps_than_the_journal_is_found(
    plant, found, tmp_path, monkeypatch
):
    plant(monkeypatch)
    settings, journal = Sink(name=SinkName.TENSORBOARD), Journal(tmp_path)
    (tmp_path / "run.yaml").write_text(SPEC)
    tracked = TrackedRun(run=load_run(tmp_path / "run.yaml"), run_dir=tmp_path)
    for step in (1, 2, 3, 4, 3):
        journal.step(replace(STEP, step=step, reward_mean=0.25, time_unix_s=1000.0 + step))
        if step == 4:
            follow(tmp_path, lambda: open_sink(settings, tracked), lambda _: True)
    follow(tmp_path, lambda: open_sink(settings, tracked), lambda _: True)
    assert list(wrong_steps_sent(tmp_path)) == found


def keep_the_weights(monkeypatch):
    monkeypatch.setattr(PolicyUpdate, "load_tensors", lambda *_, **__: None)


def keep_the_rate(monkeypatch):
    restore = PolicyUpdate.load_state_dict

    def restored(self, state):
        restore(self, state)
        self.health.backoff = RateBackoff()

    monkeypatch.setattr(PolicyUpdate, "load_state_dict", restored)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda _: None, []),
        (keep_the_weights, ["step 2: the weights are not those of step 1"]),
        (keep_the_rate, ["step 2: rate x 1.0, told 0.5"]),
    ],
    ids=["sound", "weights stay", "rate stays"],
)
async def test_a_rollback_that_ends_elsewhere_than_it_says_is_found(
    plant, found, tmp_path, monkeypatch
):
    told, recorded = [], RecordedRun(tmp_path)
    monkeypatch.setattr(Rollback, "_go_back_to", watched_rollback(recorded.witness))
    recorded.take(0)
    recorded.save(1)
    recorded.take(1)
    checkpoint, _ = CheckpointFolder(tmp_path / "checkpoints", recorded.run).load_newest()
    rollback = Rollback(
        age_steps=0,
        update=recorded.policy.update,
        dispatcher=MagicMock(step=2),
        saver=MagicMock(),
        thread=SimpleNamespace(run=AsyncMock(side_effect=lambda restore: restore())),
        signals=MagicMock(),
        gauges=MagicMock(),
        records=SimpleNamespace(event=lambda kind, message: told.append(message)),
    )
    plant(monkeypatch)
    await rollback._go_back_to(checkpoint)
    if plant is keep_the_rate:
        told = [each.replace("at x 1,", "at x 0.5,") for each in told]
    recorded.publish(2)
    recorded.take(2)
    assert list(wrong_rollbacks(told, [read_lines(tmp_path / "learner")])) == found


@pytest.mark.parametrize("is_planted", [False, True], ids=["sound", "saved a step late"])
def test_an_export_of_other_weights_than_were_announced_is_found(is_planted, tmp_path):
    recorded = RecordedRun(tmp_path)
    (tmp_path / "spec.yaml").write_text(SPEC)
    recorded.take(0)
    if is_planted:
        recorded.take(1)
    recorded.save(1)
    wrong = list(wrong_export(tmp_path, tmp_path / "payloads"))
    assert bool(wrong) == is_planted
    assert all(re.fullmatch("export: .* is not as it was announced", each) for each in wrong)


LEARNER_LOG, TOLD = Path("learner.log"), "Lease failed with UNAVAILABLE: x\n"


class FakeRun:
    """A run with two connections, of which the learner's log tells as they are cut."""

    num_links = 2

    def __init__(self, lines_by_cut=()):
        self.log, self.lines_by_cut = "", list(lines_by_cut)
        self.proxy = self.certificates = self

    def cut(self):
        self.log += self.lines_by_cut.pop(0) if self.lines_by_cut else ""
        return self.num_links

    def replace_authority(self):
        self.log += "serving with a new certificate\n"

    def mark(self):
        return {LEARNER_LOG: len(self.log)}

    def is_told(self, since, pattern):
        return bool(re.search(pattern, self.log[since[LEARNER_LOG] :]))

    async def works(self, timeout_s):
        return True


@pytest.mark.parametrize(
    ("inject", "lines_by_cut", "is_shown", "what"),
    [
        (wire_faults.replace_authority, [], True, ""),
        (wire_faults.cut, ["", "", TOLD], True, "6 connections cut"),
        (wire_faults.cut, [], False, ""),
    ],
    ids=["told before connections end", "connections without a call", "never told"],
)
async def test_a_fault_on_the_wire_that_the_run_never_tells_of_is_found(
    inject, lines_by_cut, is_shown, what, monkeypatch
):
    monkeypatch.setattr(wire_faults, "SIGN_S", 0.0)
    monkeypatch.setattr(live_run, "_POLL_S", 0.0)
    injected = await inject(FakeRun(lines_by_cut), random.Random(1))
    assert injected.is_shown is is_shown
    assert injected.what.startswith(what)
