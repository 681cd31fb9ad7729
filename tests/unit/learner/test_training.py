"""The training loop with a worker that answers at once and an update that only counts."""

import asyncio
import contextlib
import json
import shutil
import time
from dataclasses import replace
from itertools import chain

import pytest

from tests.unit.learner.scenes import answer, answers, asking, make_desk, make_run, settle
from tests.unit.learner.steps import stepped
from tests.unit.update.models import PAD, VOCABULARY, llama
from vcpo.algo import FreshTokens, MismatchError, NonFiniteWeightError
from vcpo.exported_model import ExportedModel
from vcpo.journal import Journal, read_events, read_metrics
from vcpo.metrics import LearnerMetrics
from vcpo.wire.phase import RunPhase
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.checkpoint import CheckpointError, CheckpointFolder
from vcpo_learner.gauges import LearnerGauges
from vcpo_learner.groups import Group
from vcpo_learner.pending_step import PendingStep
from vcpo_learner.policies import PolicyStore
from vcpo_learner.quarantine import Quarantine
from vcpo_learner.signals import SignalWindow
from vcpo_learner.step_record import LagStatistics, lag_statistics
from vcpo_learner.training import Training
from vcpo_learner.training_parts import TrainingParts
from vcpo_learner.update import PolicyUpdate
from vcpo_learner.update_result import SkipReason, UpdateResult
from vcpo_operator.report import learner_report


class CountingUpdate:
    """Counts its steps; refuses those that it is told to refuse."""

    def __init__(self):
        self.steps_taken = 0
        self.versions = []
        self.refused = set()
        self.fresh = FreshTokens()
        self.calibration_ages = {}
        self.wanted_fresh_tokens = 0
        self.newest = []
        self.is_whole = True

    def rehearse(self, group, *, policy_version):
        pass

    def forget(self, lease_ids):
        return {}

    def drawn(self, groups):
        return groups

    def begin(self, groups, *, policy_version):
        return PendingStep(
            trajectories=list(chain.from_iterable(groups)),
            policy_version=policy_version,
            batch=NonFiniteWeightError("none", None, 0.0),
            wanted_fresh_tokens=self.wanted_fresh_tokens,
        )

    def finish(self, pending, newest=()):
        self.steps_taken += 1
        self.versions.append(pending.policy_version)
        self.newest.append(newest)
        skipped = SkipReason.NO_GRADIENT if pending.policy_version in self.refused else None
        return UpdateResult(
            reward_mean=1.0,
            response_tokens_mean=1.0,
            on_policy_ess_ratio=1.0,
            skipped=skipped,
            fresh=self.fresh,
            calibration_age_steps=self.calibration_ages.get(pending.policy_version, 0),
        )

    def state_dict(self):
        return {"steps_taken": self.steps_taken}

    def load_state_dict(self, state):
        self.steps_taken = state["steps_taken"]


class FolderTokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


class Learner:
    """One learner process's parts, over the run directory that it shares with its successors."""

    def __init__(
        self,
        run_dir,
        *,
        update_of=lambda model, spec: CountingUpdate(),
        sleep=asyncio.sleep,
        **sections,
    ):
        self.desk = make_desk(**sections)
        model = llama()
        self.dispatcher, clock = self.desk.dispatcher, self.desk.clock
        run = make_run(**sections)
        self.update = update_of(model, run.spec)
        self.signals = SignalWindow(
            run_name="run",
            total_steps=run.spec.steps,
            batch_trajectories=run.spec.batch.trajectories,
            dispatcher=self.dispatcher,
            clock=clock,
        )
        self.gauges = LearnerGauges(
            LearnerMetrics(run="run"), dispatcher=self.dispatcher, signals=self.signals
        )
        self.training = Training(
            TrainingParts(
                run=run,
                run_dir=run_dir,
                model=model,
                tokenizer=FolderTokenizer(),
                update=self.update,
                dispatcher=self.dispatcher,
                policies=PolicyStore(incarnation="now", clock=clock),
                signals=self.signals,
                gauges=self.gauges,
                journal=Journal(run_dir),
                clock=clock,
                sleep=sleep,
            )
        )

    async def run(self, *, until_step=None, answers_evaluations=True):
        """Train beside one worker; drains when `until_step` has been reached."""
        working = asyncio.create_task(self._work(until_step, answers_evaluations))
        try:
            return await self.training.run(drain_s=0)
        finally:
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working

    async def _work(self, until_step, answers_evaluations):
        while self.dispatcher.phase is RunPhase.RUNNING:
            version = self.dispatcher.policy_version
            # One prompt at a time, and no more than the steps wanted, so that a drain cuts exactly.
            wanted = until_step is None or self.accepted() < 4 * until_step
            room = 2 if wanted else 1
            for given in await self.dispatcher.lease(asking(held=version, room=room), wait_s=0):
                if answers_evaluations or given.purpose == "train":
                    self.desk.submit(given, versions=(version,))
            if version == until_step:
                self.drain()
            # Not 0: spinning would keep the interpreter from the thread that trains and saves.
            await asyncio.sleep(0.001)

    def accept(self, *leased, **changes):
        """Have the answers to these leases accepted, whatever a service would say of them."""
        for given in leased:
            members = [replace(one, **changes) for one in answers(given.lease)]
            self.dispatcher.submit("w", given.lease.lease_id, members)

    def accepted(self):
        counts = self.dispatcher.ledger.counts()
        return counts.buffered + counts.consumed

    def drain(self):
        self.dispatcher.phase = RunPhase.DRAINING
        self.dispatcher.notify()


@pytest.fixture
def make_learner(tmp_path):
    return lambda **sections: Learner(tmp_path, **sections)


async def test_a_run_takes_its_steps_and_is_complete(make_learner, tmp_path):
    learner = make_learner()
    assert await learner.run() is RunPhase.COMPLETE
    assert learner.update.versions == [0, 1, 2]
    metrics = read_metrics(tmp_path)
    assert [step.consumed for step in metrics.steps] == [4, 8, 12]
    assert [one.step for one in metrics.evaluations] == [0, 3]
    assert (tmp_path / "model" / "model.safetensors").exists()


async def test_a_refused_update_is_a_version_too(make_learner, tmp_path):
    learner = make_learner()
    learner.update.refused = {1}
    await learner.run()
    assert [step.skipped for step in read_metrics(tmp_path).steps] == [None, "no_gradient", None]
    assert [event.message for event in read_events(tmp_path) if event.kind == "StepSkipped"] == [
        "step 2: the rewards of each prompt's answers are all equal, so none is better than another"
    ]


def fresh_tokens(gap, *, num_pieces=8):
    return FreshTokens(num_pieces=num_pieces, num_tokens=100, absolute_log_ratio=100 * gap)


async def test_a_run_whose_sampler_computes_another_policy_ends_before_its_first_version(
    make_learner, tmp_path
):
    learner = make_learner()
    learner.update.fresh = fresh_tokens(0.7)
    with pytest.raises(MismatchError, match=r"0.7 nats.*at most 0.002"):
        await learner.run()
    assert learner.dispatcher.policy_version == 0
    assert read_events(tmp_path)[-1].kind == "SelfCheckFailed"


async def test_sampler_and_learner_are_compared_once_and_when_there_is_enough_to_compare(
    make_learner, tmp_path
):
    learner = make_learner()
    learner.update.fresh = fresh_tokens(0.0005, num_pieces=7)
    finish = learner.update.finish

    def finish_step(pending, newest=()):
        result = finish(pending, newest)
        # The first two steps together have enough to compare; what the third says is training's.
        gap = 0.0015 if pending.policy_version == 0 else 0.7
        learner.update.fresh = fresh_tokens(gap, num_pieces=1)
        return result

    learner.update.finish = finish_step
    assert await learner.run() is RunPhase.COMPLETE
    assert [event.message for event in read_events(tmp_path) if event.kind == "SelfCheck"] == [
        "sampler and learner differ by 0.001 nats per token"
    ]


async def test_a_resumed_learner_of_small_batches_compares_what_its_steps_have_together(
    make_learner, tmp_path
):
    # Each step has 4 answers of one token, hence at most 5 pieces; 8 settle something.
    sections = {
        "steps": 6,
        "algorithm": {"maxPolicyLagSteps": 1, "onPolicyEssRatio": 0.9},
        "learner": {"maxMismatchNats": 100},
        "update_of": lambda model, spec: PolicyUpdate(model, spec, PAD),
    }
    await make_learner(**sections).run(until_step=1)
    later = make_learner(**sections)
    later.training.resume()
    assert await later.run() is RunPhase.COMPLETE
    assert [event.kind for event in read_events(tmp_path)].count("SelfCheck") == 1


async def test_sampler_and_learner_are_compared_again_after_a_resume(make_learner, tmp_path):
    for until_step in (1, None):
        learner = make_learner()
        learner.training.resume()
        learner.update.fresh = fresh_tokens(0.001)
        await learner.run(until_step=until_step)
    kinds = [event.kind for event in read_events(tmp_path)]
    assert kinds.count("SelfCheck") == 2


async def test_a_step_is_given_answers_of_its_own_version_that_arrived_beside_its_batch(
    make_learner,
):
    learner = make_learner(algorithm={"maxPolicyLagSteps": 4})
    learner.update.wanted_fresh_tokens = 3
    begin = learner.update.begin

    def begin_slowly(groups, *, policy_version):
        while learner.accepted() < 12:  # all that the run will need
            time.sleep(0.001)
        return begin(groups, policy_version=policy_version)

    learner.update.begin = begin_slowly
    await learner.run()
    first, *later = learner.update.newest
    # Everything was sampled by version 0: the later steps have nothing of their own.
    assert [one.num_tokens_of(0) for one in first] == [1, 1, 1]
    assert later == [[], []]


async def test_the_age_of_the_calibration_is_among_the_signals(make_learner, tmp_path):
    learner = make_learner()
    learner.update.calibration_ages = {2: 7}
    await learner.run()
    assert learner.signals.message().calibration_age_steps == 7
    assert [one.calibration_age_steps for one in read_metrics(tmp_path).steps] == [0, 0, 7]


async def test_a_drained_run_saves_and_a_resumed_one_goes_on_from_there(make_learner, tmp_path):
    assert await make_learner().run(until_step=1) is RunPhase.DRAINING
    later = make_learner()
    assert later.training.resume() == 1
    assert later.dispatcher.ledger.counts().consumed == 4
    assert await later.run() is RunPhase.COMPLETE
    assert later.update.versions == [1, 2]
    assert [step.step for step in read_metrics(tmp_path).steps] == [1, 2, 3]


async def test_a_run_that_never_updated_says_so_however_often_it_was_resumed(make_learner):
    for until_step in (1, None):
        learner = make_learner()
        learner.update.refused = {0, 1, 2}
        learner.training.resume()
        await learner.run(until_step=until_step)
    assert learner_report(learner.signals.message()).has_never_updated
    later = make_learner()  # with no step left to take
    later.training.resume()
    await later.training.run(drain_s=0)
    assert learner_report(later.signals.message()).has_never_updated


async def test_a_step_that_a_resume_takes_again_is_not_counted_twice(make_learner, tmp_path):
    await make_learner().run(until_step=1)
    Journal(tmp_path).step(stepped(step=2, skipped="low_ess"))  # after the checkpoint
    later = make_learner()
    assert later.training.resume() == 1
    assert later.signals.message().skipped_steps_in_a_row == 0


async def test_a_fresh_run_directory_has_nothing_to_resume(make_learner):
    assert make_learner().training.resume() == 0


async def test_a_run_does_not_begin_anew_beside_the_checkpoints_of_another(make_learner):
    make_learner().training.require_unused()
    await make_learner().run(until_step=1)
    with pytest.raises(CheckpointError, match=r"holds a checkpoint of step 1; add --resume"):
        make_learner().training.require_unused()


async def test_a_resumed_learner_does_not_report_its_past_as_production(make_learner):
    await make_learner().run(until_step=1)
    later = make_learner()
    later.training.resume()
    later.desk.clock.advance(1.0)
    assert later.signals.message().consumed_trajectories_per_second == 0.0


async def test_a_checkpoint_that_consumed_something_else_than_its_steps_is_refused(
    make_learner, tmp_path
):
    await make_learner().run(until_step=1)
    folder = CheckpointFolder(tmp_path / "checkpoints", make_run())
    checkpoint, _ = folder.load_newest()
    folder.save(replace(checkpoint, ledger=ledger_pb2.LedgerSnapshot()))
    with pytest.raises(CheckpointError, match="step 1: 0 trajectories consumed, must be 4"):
        make_learner().training.resume()


async def test_a_learner_that_starts_after_the_end_is_complete_at_once_and_asks_nobody(
    make_learner, tmp_path
):
    await make_learner().run()
    records = (tmp_path / "metrics.jsonl").read_bytes()
    later = make_learner()
    later.training.resume()
    assert await later.training.run(drain_s=0) is RunPhase.COMPLETE
    assert (tmp_path / "metrics.jsonl").read_bytes() == records
    assert read_events(tmp_path)[-1].message == "3 steps; complete before this start"


async def test_more_steps_go_on_from_a_run_that_was_complete(make_learner, tmp_path):
    await make_learner().run()
    later = make_learner(steps=5)
    assert later.training.resume() == 3
    assert await later.run() is RunPhase.COMPLETE
    assert ExportedModel.read(tmp_path / "model").step == 5


async def test_a_run_whose_model_is_missing_writes_it(make_learner, tmp_path):
    await make_learner().run()
    shutil.rmtree(tmp_path / "model")
    later = make_learner()
    later.training.resume()
    assert await later.run() is RunPhase.COMPLETE
    assert (tmp_path / "model" / "model.safetensors").exists()


async def test_a_damaged_checkpoint_is_told_and_set_aside_and_the_one_before_is_gone_on_from(
    make_learner, tmp_path
):
    await make_learner(checkpoint={"everySteps": 1}).run(until_step=2)
    parameters = tmp_path / "checkpoints" / "step-00000002" / "model.safetensors"
    content = bytearray(parameters.read_bytes())
    content[len(content) // 2] ^= 4
    parameters.write_bytes(content)
    later = make_learner()
    assert later.training.resume() == 1
    (told,) = [event for event in read_events(tmp_path) if event.kind == "CheckpointDamaged"]
    assert "step-00000002/model.safetensors" in told.message
    assert "going on from step 1" in told.message
    assert later.dispatcher.ledger.counts().consumed == 4
    assert await later.run() is RunPhase.COMPLETE
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000003"]


async def test_a_group_that_breaks_the_update_is_dropped_kept_on_disk_and_told_and_the_run_goes_on(
    make_learner, tmp_path
):
    learner = make_learner(
        update_of=lambda model, spec: PolicyUpdate(model, spec, PAD),
        learner={"maxMismatchNats": 100.0},
    )
    poison, *others = await learner.dispatcher.lease(asking(room=4), wait_s=0)
    learner.accept(poison, response_token_ids=(VOCABULARY,))
    learner.accept(*others)
    assert await learner.run() is RunPhase.COMPLETE
    (told,) = [event for event in read_events(tmp_path) if event.kind == "GroupQuarantined"]
    assert f"{poison.lease.lease_id} (prompt 0) is not trained on: IndexError" in told.message
    kept = tmp_path / "quarantine" / f"{poison.lease.lease_id}.json"
    assert str(kept) in told.message
    document = json.loads(kept.read_text())
    assert document["trajectories"][0]["response_token_ids"] == [VOCABULARY]
    last = read_metrics(tmp_path).steps[-1]
    assert (last.step, last.consumed, last.dropped) == (3, 12, {"quarantined": 2})
    assert list(kept.parent.iterdir()) == [kept]


class KilledError(BaseException):
    """Stands in for a signal that no process survives: nobody handles it."""


async def test_groups_that_a_learner_died_with_twice_are_left_out_though_the_checkpoint_holds_them(
    make_learner, tmp_path
):
    def dying(learner):
        begin = learner.update.begin

        def begin_step(groups, *, policy_version):
            if policy_version == 1:
                raise KilledError
            while learner.accepted() < 8:  # so that the next batch is in the checkpoint
                time.sleep(0.001)
            return begin(groups, policy_version=policy_version)

        learner.update.begin = begin_step
        return learner

    async def dies():
        learner = dying(make_learner(checkpoint={"everySteps": 1}))
        learner.training.resume()
        with pytest.raises(KilledError):
            await learner.run()

    await dies()
    await dies()
    assert not any(event.kind == "GroupQuarantined" for event in read_events(tmp_path))
    later = make_learner(checkpoint={"everySteps": 1})
    assert later.training.resume() == 1
    assert later.dispatcher.ledger.counts().dropped["quarantined"] == 4
    told = [event.message for event in read_events(tmp_path) if event.kind == "GroupQuarantined"]
    assert len(told) == 2
    assert all("the learner died 2 times in a step with it" in message for message in told)
    assert await later.run() is RunPhase.COMPLETE
    assert len(list((tmp_path / "quarantine").iterdir())) == 2


async def test_what_is_in_quarantine_is_left_out_of_every_checkpoint_that_holds_it(
    make_learner, tmp_path
):
    first = make_learner()
    first.accept(*await first.dispatcher.lease(asking(room=4), wait_s=0))
    batch = first.dispatcher.ledger.take_batch(policy_version=0, max_lag_steps=1)
    Quarantine(tmp_path / "quarantine").keep(
        batch[0].lease_id, batch[0].trajectories, prompt_index=0, reason="it was odd", step=0
    )
    first.dispatcher.ledger.give_back(batch)
    first.drain()
    await first.training.run(drain_s=0)
    later = make_learner()
    later.training.resume()
    assert later.dispatcher.ledger.counts().dropped["quarantined"] == 2
    assert not any(event.kind == "GroupQuarantined" for event in read_events(tmp_path))


REPLAYING = {
    "update_of": lambda model, spec: PolicyUpdate(model, spec, PAD),
    "algorithm": {"method": "tba", "maxPolicyLagSteps": 1, "onPolicyProbability": 0.5},
    "batch": {"promptsPerStep": 2, "trajectoriesPerPrompt": 2, "promptPool": 9},
    "learner": {"maxMismatchNats": 100.0},
}


async def test_a_kept_answer_that_breaks_the_update_is_forgotten_kept_on_disk_and_told(
    make_learner, tmp_path
):
    learner = make_learner(**REPLAYING)
    poison = replace(answer("train-past-1", 0), response_token_ids=(VOCABULARY,))
    learner.update.drawn([[poison]])
    assert await learner.run() is RunPhase.COMPLETE
    (told,) = [event for event in read_events(tmp_path) if event.kind == "GroupQuarantined"]
    assert told.message.startswith("train-past-1 (kept for replay) is not trained on: IndexError")
    document = json.loads((tmp_path / "quarantine" / "train-past-1.json").read_text())
    assert document["prompt_index"] is None
    assert document["trajectories"][0]["response_token_ids"] == [VOCABULARY]
    last = read_metrics(tmp_path).steps[-1]
    assert (last.step, last.consumed, last.dropped) == (3, 12, {})


async def test_a_replay_that_a_learner_died_with_twice_is_not_restored(make_learner, tmp_path):
    def held(learner):
        kept = chain.from_iterable(learner.update.state_dict()["replay"]["held"])
        return [one["trajectory_id"].rpartition("/")[0] for one in kept]

    first = make_learner(**REPLAYING)
    first.update.drawn([[replace(answer("train-past-1", 0), response_token_ids=(9,))]])
    await first.run(until_step=1)
    assert "train-past-1" in held(first)
    for _ in range(2):
        Quarantine(tmp_path / "quarantine").enter(["train-past-1"])
    for _ in range(2):
        later = make_learner(**REPLAYING)
        assert later.training.resume() == 1
        assert set(held(later)) == set(held(first)) - {"train-past-1"}
    (told,) = [event for event in read_events(tmp_path) if event.kind == "GroupQuarantined"]
    assert "the learner died 2 times in a step with it" in told.message
    assert (tmp_path / "quarantine" / "train-past-1.json").exists()


async def test_a_round_beside_training_that_is_unanswered_when_the_run_drains_is_given_up(
    make_learner, tmp_path
):
    await make_learner().run(until_step=1)  # so that no round stands before the first step
    later = make_learner(evaluation={"prompts": 1, "everySteps": 2})
    later.training.resume()
    training = asyncio.create_task(later.run(answers_evaluations=False))
    while not later.training._evaluation:
        await settle()
    later.drain()
    assert await training is RunPhase.DRAINING
    kinds = [event.kind for event in read_events(tmp_path)]
    assert kinds.count("EvaluationWithoutResult") == 1


async def test_what_goes_wrong_in_a_round_beside_training_ends_the_run(make_learner):
    learner = make_learner(evaluation={"prompts": 1, "everySteps": 1}, steps=50)

    def broken(record):
        if record.step > 0:
            raise OSError("no space left")

    learner.signals.evaluation = broken
    with pytest.raises(OSError, match="no space left"):
        await learner.run()
    assert learner.dispatcher.policy_version < 50


async def test_checkpoints_are_written_while_the_run_goes_on(make_learner, tmp_path):
    await make_learner(checkpoint={"everySteps": 1, "keep": 9}).run()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002", "step-00000003"]


def group(*versions):
    one = answer("train-now-0", 0, versions=versions)
    return Group(
        grant_number=0, lease_id="train-now-0", prompt_index=0, attempt=1, trajectories=(one,)
    )


def test_lag_counts_every_token_once():
    # Ages at version 5: 5, 1, 1 and 0, 0, 0; in order 0 0 0 1 1 5.
    lag = lag_statistics([group(0, 4, 4), group(5, 5, 5)], policy_version=5)
    assert lag == LagStatistics(mean=7 / 6, p50=0, maximum=5)


def test_the_median_lag_is_the_lower_of_two_in_the_middle():
    assert lag_statistics([group(0, 0, 3, 3)], policy_version=3).p50 == 0
    assert lag_statistics([group(0, 0, 0, 3, 3)], policy_version=3).p50 == 3


async def test_the_log_tells_of_steps_saves_and_evaluations_and_of_no_single_skip(
    make_learner, caplog
):
    caplog.set_level("INFO", logger="vcpo_learner")
    learner = make_learner()
    learner.update.refused = {1}
    await learner.run()
    starts = [record.getMessage().split(":")[0] for record in caplog.records]
    assert [start for start in starts if start.startswith("step")] == [
        "step 1/3",
        "step 2/3",
        "step 3/3",
    ]
    assert {"evaluation of step 0", "evaluation of step 3", "CheckpointSaved"} <= set(starts)
    assert "StepSkipped" not in starts
    assert "no update (no_gradient)" in caplog.text
