"""Learners that die, and what the learner after them has and does again."""

import contextlib
import sqlite3

import pytest
import torch

from tests.fixtures.learner.dispatcher import make_trajectory, work_request
from tests.fixtures.learner.models import PAD
from tests.fixtures.learner.training import TrainingFixture
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.records.journal import METRICS_FILE, read_events, read_metrics
from vcpo.wire.phase import RunPhase
from vcpo.wire.v1.ledger_pb2 import VersionPublished
from vcpo_learner.checkpoints.manifest import CheckpointError
from vcpo_learner.training.quarantine import Quarantine
from vcpo_learner.update.policy_update import PolicyUpdate


class KilledError(BaseException):
    """Stands in for a signal that no process survives: nobody handles it."""


def dies_before(learner, version):
    """Let a learner die in the step on a version."""
    begin = learner.update.begin

    def begin_step(groups, *, policy_version):
        if policy_version == version:
            raise KilledError
        return begin(groups, policy_version=policy_version)

    learner.update.begin = begin_step
    return learner


async def killed(learner):
    with pytest.raises(KilledError):
        await learner.run()


def trained_on(learner):
    """Note the leases of every batch of an update."""
    batches, begin = [], learner.update.begin

    def begin_step(groups, *, policy_version):
        batches.append([one.trajectory_id for group in groups for one in group])
        return begin(groups, policy_version=policy_version)

    learner.update.begin = begin_step
    return batches


def told(tmp_path, kind):
    return [event.message for event in read_events(tmp_path) if event.kind == kind]


async def test_a_learner_without_a_checkpoint_takes_its_steps_again_on_the_same_batches(
    make_learner, tmp_path
):
    first = make_learner(steps=4)
    batches = trained_on(first)
    await killed(dies_before(first, 2))
    records = read_metrics(tmp_path).steps
    later = make_learner(steps=4)
    again = trained_on(later)
    assert later.training.resume() == 0
    assert "without a checkpoint; 2 later steps are redone" in told(tmp_path, "Resumed")[0]
    assert await later.run() is RunPhase.COMPLETE
    assert later.training._recovery.steps == [], "batches that were redone stay in memory"
    assert again[:2] == batches[:2]
    assert later.update.versions == [0, 1, 2, 3]
    # Nothing of the redone steps is written a second time.
    assert read_metrics(tmp_path).steps[:2] == records
    assert told(tmp_path, "Redone") == ["up to step 2; 0 versions differ from those of before"]


async def test_a_log_of_another_spec_is_refused_without_a_checkpoint(make_learner):
    first = dies_before(make_learner(), 1)
    first.training.require_unused()
    await killed(first)
    other = make_learner(batch={"promptsPerStep": 1, "trajectoriesPerPrompt": 4})
    with pytest.raises(CheckpointError) as caught:
        other.training.resume()
    assert "redo-log.sqlite: belongs to a run with another spec" in str(caught.value)
    assert "spec.batch.promptsPerStep: 2 -> 1" in str(caught.value)
    other.log.close()
    later = make_learner()
    later.training.resume()
    assert later.dispatcher.ledger.counts().consumed == 4


async def test_nothing_that_was_accepted_is_lost_with_the_learner(make_learner):
    learner = make_learner(algorithm={"maxPolicyLagSteps": 4})
    whole, part = await learner.dispatcher.lease(work_request(room=4), wait_s=0)
    learner.accept(whole)
    learner.dispatcher.submit("w", part.lease_id, [make_trajectory(part.lease_id, 1)])
    await learner.log.wait_until_kept()
    later = make_learner(algorithm={"maxPolicyLagSteps": 4})
    later.training.resume()
    counts = later.dispatcher.ledger.counts()
    assert (counts.buffered, counts.in_flight, counts.dropped) == (3, 0, {"learner_restarted": 1})


async def test_a_redone_critical_step_takes_nothing_that_was_accepted_since(make_learner):
    learner = make_learner(steps=5, algorithm={"maxPolicyLagSteps": 4})
    learner.update.warnings = {0: WarningLevel.CRITICAL}
    record_step = learner.signals.record_step

    def raise_again(record):
        record_step(record)
        if record.step == 2:
            learner.dispatcher.throttle(4)

    learner.signals.record_step = raise_again
    await killed(dies_before(learner, 3))
    later = make_learner(steps=5, algorithm={"maxPolicyLagSteps": 4})
    later.update.warnings = {0: WarningLevel.CRITICAL}
    later.training.resume()
    before = later.dispatcher.ledger.counts()
    assert later.dispatcher.lag_limit_steps == 4
    assert await later.run() is RunPhase.COMPLETE
    after = later.dispatcher.ledger.counts()
    assert before.buffered >= 4, "the batch of the step that killed it"
    assert after.dropped.get("throttled", 0) == before.dropped.get("throttled", 0)


async def test_groups_that_are_incomplete_after_a_restart_are_completed_without_a_lag(make_learner):
    # A batch of 2 x 4, of which 3 + 3 arrived: one more for each group fits, a whole one does not.
    run = {
        "batch": {"promptsPerStep": 2, "trajectoriesPerPrompt": 4},
        "algorithm": {"maxPolicyLagSteps": 0},
    }
    learner = make_learner(**run)
    for given in await learner.dispatcher.lease(work_request(room=8), wait_s=0):
        sent = [make_trajectory(given.lease_id, number) for number in range(3)]
        learner.dispatcher.submit("w", given.lease_id, sent)
    await learner.log.wait_until_kept()
    later = make_learner(**run)
    later.training.resume()
    leased = await later.dispatcher.lease(work_request(room=8), wait_s=0)
    assert [given.num_trajectories for given in leased] == [1, 1]
    later.accept(*leased)
    assert later.dispatcher.ledger.counts().buffered == 8


SYNCHRONOUS = {
    "steps": 5,
    "algorithm": {"maxPolicyLagSteps": 0, "onPolicyEssRatio": 0.9},
    "learner": {"maxMismatchNats": 100},
    "update_of": lambda model, spec: PolicyUpdate(model, spec, PAD),
}


def answers_by_version(learner):
    """Let the worker's answers depend on prompt and version only, and differ in their rewards."""
    submit = learner.submit

    def submit_answer(given, *, versions):
        lease = given
        rewarded = lease.prompt_index % 2
        for number in range(lease.num_trajectories):
            one = make_trajectory(
                lease.lease_id, number, versions=versions * 3, reward=float(number == rewarded)
            )
            learner.dispatcher.submit("w", lease.lease_id, [one])

    learner.submit = lambda given, **changes: (
        submit(given, **changes) if given.purpose != "train" else submit_answer(given, **changes)
    )
    return learner


def parameters(learner):
    return [each.detach().clone() for each in learner.model.parameters()]


async def play(run_dir, *, every_steps, dies_at=None):
    """Run or resume a synchronous learner, to its end or until it dies before a version."""
    learner = TrainingFixture(run_dir, **SYNCHRONOUS, checkpoint={"everySteps": every_steps})
    learner.training.resume()
    answers_by_version(learner)
    if dies_at is not None:
        dies_before(learner, dies_at)
    with contextlib.suppress(KilledError):
        await learner.run()
    return learner


def check_equal(expected, found):
    """Check that two learners ended alike."""
    assert found.dispatcher.policy_version == expected.dispatcher.policy_version == 5
    for one, other in zip(parameters(expected), parameters(found), strict=True):
        assert torch.equal(one, other)
    assert found.dispatcher.ledger.counts().consumed == 20


@pytest.mark.parametrize(("version", "every_steps"), [(0, 50), (3, 50), (3, 2), (4, 1)])
async def test_a_run_that_was_killed_ends_with_the_parameters_of_one_that_was_not(
    tmp_path, version, every_steps
):
    whole = await play(tmp_path / "whole", every_steps=every_steps)
    await play(tmp_path / "killed", every_steps=every_steps, dies_at=version)
    resumed = await play(tmp_path / "killed", every_steps=every_steps)
    check_equal(whole, resumed)
    losses = [
        [(one.reward_mean, one.ess_ratio, one.gradient_norm, one.learning_rate) for one in steps]
        for steps in (
            read_metrics(tmp_path / "whole").steps,
            read_metrics(tmp_path / "killed").steps,
        )
    ]
    assert losses[0] == losses[1]
    assert not told(tmp_path / "killed", "RedoDiffers")


def each_line(line):
    def replace_lines(journal):
        journal.write_bytes(line * journal.read_bytes().count(b"\n"))

    return replace_lines


HARMS = {
    "absent": lambda journal: journal.unlink(),
    "null": each_line(b"null\n"),
}


@pytest.mark.parametrize("every_steps", [50, 2])
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
async def test_a_harmed_or_absent_journal_changes_nothing_that_a_resumed_run_trains(
    tmp_path, harm, every_steps
):
    whole = await play(tmp_path / "whole", every_steps=every_steps)
    await play(tmp_path / "killed", every_steps=every_steps, dies_at=3)
    harm(tmp_path / "killed" / METRICS_FILE)
    resumed = await play(tmp_path / "killed", every_steps=every_steps)
    check_equal(whole, resumed)
    checkpoints = [
        sorted(path.name for path in (tmp_path / run / "checkpoints").iterdir())
        for run in ("whole", "killed")
    ]
    if every_steps == 2:  # without a checkpoint one follows the redo
        assert checkpoints[0] == checkpoints[1]


async def test_parameters_that_a_redo_does_not_reach_again_are_reported_once(
    make_learner, tmp_path
):
    await killed(dies_before(make_learner(steps=4), 3))
    later = make_learner(steps=4)
    later.training.resume()
    with torch.no_grad():  # as if the first model were another one
        next(later.model.parameters()).add_(1.0)
    await later.run()
    (message,) = told(tmp_path, "RedoDiffers")
    assert message.startswith("version 0 has other parameters than before the restart")


@pytest.mark.parametrize("other", [{"num_ranks": 2}, {"num_shards": 2}])
async def test_versions_of_other_ranks_or_shards_are_not_compared(make_learner, tmp_path, other):
    await killed(dies_before(make_learner(steps=4), 3))
    later = make_learner(steps=4)
    later.training.resume()
    assert later.log._versions
    for published in later.log._versions.values():
        published.MergeFrom(VersionPublished(checksum=1, **other))
    await later.run()
    assert not told(tmp_path, "RedoDiffers")


async def test_a_log_reaches_back_to_the_checkpoint_that_a_rollback_may_need(
    make_learner, tmp_path
):
    often = {"everySteps": 4, "keep": 2}
    await killed(dies_before(make_learner(steps=30, checkpoint=often), 21))
    kept = sorted((tmp_path / "checkpoints").glob("step-*"))
    # Good and 11 steps old is that of step 4, the next to be is that of step 12, and 20 is newest.
    assert [path.name[-2:] for path in kept] == ["04", "12", "20"]
    (kept[-1] / "update.pt").write_bytes(b"damaged")
    later = make_learner(steps=30, checkpoint=often)
    assert later.training.resume() == 12
    assert "9 later steps are redone" in told(tmp_path, "Resumed")[0]
    assert not told(tmp_path, "LogDamaged")


async def test_a_group_that_kills_the_learner_during_a_redo_ends_the_redo(make_learner, tmp_path):
    await killed(dies_before(make_learner(steps=4), 3))
    for _ in range(2):
        later = dies_before(make_learner(steps=4), 1)
        later.training.resume()
        await killed(later)
    last = make_learner(steps=4)
    last.training.resume()
    ledger = last.dispatcher.ledger
    ledger.counts().check()
    assert ledger.counts().consumed == 4
    assert ledger.counts().dropped["quarantined"] == 4
    (message,) = told(tmp_path, "RedoStopped")
    assert message.startswith("step 2 cannot be redone without a group in quarantine")
    assert await last.run() is RunPhase.COMPLETE
    assert [step.step for step in read_metrics(tmp_path).steps] == [1, 2, 3, 4]
    assert len(Quarantine(tmp_path / "quarantine").kept_lease_ids()) == 2


async def test_a_checkpoint_that_was_due_during_a_redo_follows_it(make_learner, tmp_path):
    await killed(dies_before(make_learner(steps=9), 3))
    later = make_learner(steps=9, checkpoint={"everySteps": 2})
    later.training.resume()
    await killed(dies_before(later, 3))
    names = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert names == ["step-00000003"]


async def test_a_run_that_is_stopped_during_a_redo_leaves_the_rest_to_the_log(
    make_learner, tmp_path
):
    await killed(dies_before(make_learner(steps=4), 3))
    later = make_learner(steps=4)
    later.training.resume()
    later.drain()
    assert await later.run() is RunPhase.DRAINING
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    last = make_learner(steps=4)
    last.training.resume()
    assert await last.run() is RunPhase.COMPLETE
    assert last.update.versions == [0, 1, 2, 3]


def lose_changes_after_the_checkpoint(tmp_path):
    """As SQLite does at the start after damage of its write-ahead log."""
    with contextlib.closing(sqlite3.connect(tmp_path / "redo-log.sqlite")) as tables:
        tables.execute("DELETE FROM change WHERE position > (SELECT max(position) FROM checkpoint)")
        tables.commit()


def redo_log_files(tmp_path):
    return [path for path in tmp_path.glob("redo-log*") if path.is_file()]


async def test_steps_that_a_log_has_lost_are_told_with_their_numbers(make_learner, tmp_path):
    often = {"everySteps": 4, "keep": 2}
    await killed(dies_before(make_learner(steps=9, checkpoint=often), 7))
    lose_changes_after_the_checkpoint(tmp_path)
    later = make_learner(steps=9, checkpoint=often)
    assert later.training.resume() == 4
    (message,) = told(tmp_path, "LogDamaged")
    assert "metrics.jsonl has step 7 and the run goes on from step 4: 3 steps are taken" in message
    lost = int(message.split(" later ones, which were committed")[0].split()[-1])
    # Each of three steps had two leases, two submissions at least, its batch and its version.
    assert lost == later.log.lost_changes >= 3 * 6
    later.gauges.refresh()
    assert value(later, "vcpo_learner_lost_changes") == lost
    assert later.signals.message().lost_changes == lost
    assert await later.run() is RunPhase.COMPLETE
    last = make_learner(steps=9, checkpoint=often)
    last.training.resume()
    last.gauges.refresh()
    assert value(last, "vcpo_learner_lost_changes") == 0
    assert len(told(tmp_path, "LogDamaged")) == 1


def value(learner, name):
    return learner.gauges._metrics.registry.get_sample_value(name, {"run": "run"})


async def test_a_log_and_its_mark_that_were_removed_are_told_with_the_steps_that_they_held(
    make_learner, tmp_path
):
    often = {"everySteps": 4, "keep": 2}
    await killed(dies_before(make_learner(steps=9, checkpoint=often), 7))
    for path in redo_log_files(tmp_path):
        path.unlink()
    later = make_learner(steps=9, checkpoint=often)
    assert later.training.resume() == 4
    (message,) = told(tmp_path, "LogDamaged")
    assert "it ends at change 0, and the checkpoint holds change" in message
    assert "the run goes on from step 4: 3 steps are taken anew" in message


async def test_a_run_whose_checkpoints_are_gone_is_refused_with_the_cure(make_learner, tmp_path):
    often = {"everySteps": 4, "keep": 2}
    await killed(dies_before(make_learner(steps=9, checkpoint=often), 7))
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    later = make_learner(steps=9, checkpoint=often)
    with pytest.raises(CheckpointError) as caught:
        later.training.resume()
    assert "checkpoints: holds no checkpoint" in str(caught.value)
    assert "redo-log.sqlite goes on from one of step 4: put its folder back" in str(caught.value)
    later.log.close()
    # Nothing was changed: with the folder back, the run goes on.
    (tmp_path / "elsewhere").rename(tmp_path / "checkpoints")
    last = make_learner(steps=9, checkpoint=often)
    assert last.training.resume() == 4
    assert not told(tmp_path, "LogDamaged")


async def test_a_new_run_is_refused_where_only_the_mark_of_another_is_left(make_learner, tmp_path):
    await killed(dies_before(make_learner(), 1))
    for path in redo_log_files(tmp_path):
        if path.name != "redo-log.mark":
            path.unlink()
    with pytest.raises(CheckpointError, match="holds a redo log with accepted trajectories"):
        make_learner().training.require_unused()


async def test_steps_that_were_undone_on_purpose_are_no_damage(make_learner, tmp_path):
    await killed(dies_before(make_learner(steps=4), 3))
    for _ in range(2):
        later = dies_before(make_learner(steps=4), 1)
        later.training.resume()
        await killed(later)
    stopped = make_learner(steps=4)
    stopped.training.resume()  # without a group in quarantine, from step 1
    assert told(tmp_path, "RedoStopped")
    await stopped.log.wait_until_kept()
    make_learner(steps=4).training.resume()
    assert not told(tmp_path, "LogDamaged")
