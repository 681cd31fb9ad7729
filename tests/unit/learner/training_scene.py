"""A learner's training loop over a run directory, with an update that only counts."""

import asyncio
import contextlib
from dataclasses import replace
from itertools import chain

from tests.unit.learner.scenes import answers, asking, make_desk, make_run
from tests.unit.update.models import llama
from vcpo.algo import FreshTokens, NonFiniteWeightError
from vcpo.journal import Journal
from vcpo.metrics import LearnerMetrics
from vcpo.wire.phase import RunPhase
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.training.loop import Training
from vcpo_learner.training.parts import TrainingParts
from vcpo_learner.update.pending_step import PendingStep
from vcpo_learner.update.result import SkipReason, UpdateResult
from vcpo_learner.weights.store import PolicyStore


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
