"""The ledger against its model, through any order of grants, responses, ends, steps and crashes."""

from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fixtures.learner.dispatcher import (
    TIMEOUT_S,
    ManualClock,
    NoLog,
    make_ledger,
    make_partial_response,
    make_trajectory,
)
from tests.unit.learner.ledger.ledger_model import LedgerModel
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.algo.health.guards import Rollbacks
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.v1 import ledger_pb2
from vcpo.wire.versions import step_of, version_of
from vcpo_learner.ledger.lag_limit import LagLimit
from vcpo_learner.ledger.redo_log import change_from_bytes, change_to_bytes

MAX_LAG_STEPS = 1
LIMITS = st.none() | st.integers(0, MAX_LAG_STEPS)
"""Of the throttle, or none."""
WORKERS = st.sampled_from(["left", "right"])
PICKS = st.integers(0, 31)
"""Of a lease: three of four are open ones."""
PLACES = {"in_flight", "buffered", "consumed"}


class ListLog(NoLog):
    """A log of encoded changes, in memory."""

    def __init__(self):
        self.data = []

    @property
    def position(self):
        return len(self.data)

    def append(self, change):
        self.data.append(change_to_bytes(change))

    def read(self, after):
        return map(change_from_bytes, self.data[after:])

    def lose_after(self, position):
        del self.data[position:]


class LedgerMachine(RuleBasedStateMachine):
    def version(self, step=None):
        return version_of(self.ledger.restarts, self.model.step if step is None else step)

    def start(self, incarnation):
        return make_ledger(self.clock, incarnation=incarnation, log=self.log)

    @initialize()
    def begin(self):
        self.clock = ManualClock()
        self.log = ListLog()
        self.starts = 0
        self.ledger = self.start("start0")
        self.model = LedgerModel()
        self.lease_ids = ["train-start0-999"]  # the first was never granted
        self.failures_of = {}
        self.policies = {}
        self.keep()

    @precondition(lambda self: len(self.moments) > 4)
    @rule()
    def make_a_checkpoint(self):
        self.keep()

    def keep(self):
        self.kept, self.kept_model = self.ledger.snapshot(), deepcopy(self.model)
        self.moments = []

    @precondition(lambda self: len(self.moments) > 4)
    @rule(pick=st.integers(0, 4))
    def crash(self, pick):
        """What was not written yet may be lost, from any moment after the checkpoint on."""
        position, self.model = deepcopy(self.moments[-1 - pick % len(self.moments)])
        self.starts += 1
        self.log.lose_after(position)
        self.ledger = self.start(f"start{self.starts}")
        # Written long after it was taken, and one group to a file.
        data = [part.SerializeToString() for part in self.kept.parts(part_bytes=1)]
        self.ledger.restore([ledger_pb2.LedgerSnapshot.FromString(part) for part in data])
        for change in self.log.read(self.kept.head.log_position):
            self.ledger.replay(change)
        self.ledger.restart()
        self.model.restart(self.kept_model.step)
        self.model.fulfilled = self.model.fulfilled[len(self.kept_model.fulfilled) :]
        self.kept_model.fulfilled = []
        self.failures_of = dict.fromkeys(self.model.buffered, 0)
        self.moments = []  # the next crash comes after this start

    @rule(worker=WORKERS, num_groups=st.integers(1, 3))
    def grant(self, worker, num_groups):
        oldest = max(0, self.model.step - MAX_LAG_STEPS)
        leases = self.ledger.grant(
            worker, num_groups=num_groups, policy_version=self.version(), oldest_step=oldest
        )
        for lease in leases:
            promise = self.model.grant(lease.lease_id, worker, self.clock(), oldest_partial=oldest)
            assert [one.oldest_step for one in lease.partial_responses] == (
                [] if promise.partial is None else [promise.partial]
            )
            assert lease.lease_id not in self.lease_ids
            assert (lease.grant_number, lease.prompt_index) == (
                promise.number,
                promise.prompt_index,
            )
            self.failures_of[promise.number] = promise.failures
            self.lease_ids.append(lease.lease_id)
        assert len(leases) == num_groups

    @rule(pick=PICKS, numbers=st.sampled_from([(0,), (1,), (0, 1), (1, 0)]), age=st.integers(0, 2))
    def submit(self, pick, numbers, age):
        self.deliver(self.lease_at(pick), numbers, age)

    def lease_at(self, pick):
        known = self.lease_ids if pick % 4 == 0 or not self.model.open else list(self.model.open)
        return known[-1 - pick // 4 % len(known)]

    def deliver(self, lease_id, numbers, age=0):
        oldest = max(0, self.model.step - age)
        versions = (self.version(oldest), self.version())
        if not numbers:
            return
        sent = [make_trajectory(lease_id, number, versions=versions) for number in numbers]
        expected = self.model.submit(lease_id, numbers, oldest)
        if not expected:
            with pytest.raises(InvalidMessageError, match=r"trajectory_id"):
                self.ledger.submit(lease_id, sent)
            return
        assert [str(one) for one in self.ledger.submit(lease_id, sent)] == expected

    @rule(worker=WORKERS, leaves=st.integers(0, 3), is_evaluated=st.booleans())
    def work_and_take_a_step(self, worker, leaves, is_evaluated):
        """Whole groups arrive, and a step is taken; parts of the newest ones arrive."""
        self.grant(worker, 3)
        num_whole = len(self.model.open) - leaves
        for place, lease_id in enumerate(list(self.model.open)):
            numbers = self.model.open[lease_id].numbers
            self.deliver(lease_id, numbers if place < num_whole else numbers[:-1])
        self.take_batch(None)
        if is_evaluated:
            self.evaluate(0, 0.5)

    @precondition(lambda self: self.model.open)
    @rule(pick=PICKS, name=st.sampled_from(["{}/2", "{}/-1", "{}/00", "{}/", "{}", "other/0"]))
    def submit_what_was_not_asked_for(self, pick, name):
        lease_id = list(self.model.open)[pick % len(self.model.open)]
        asked = make_trajectory(lease_id, self.model.open[lease_id].numbers[0])
        foreign = replace(asked, trajectory_id=name.format(lease_id))
        with pytest.raises(InvalidMessageError, match=r"trajectories\[1\]\.trajectory_id"):
            self.ledger.submit(lease_id, [asked, foreign])

    @rule(pick=PICKS)
    def fail(self, pick):
        lease_id = self.lease_at(pick)
        self.ledger.fail(lease_id)
        if lease_id in self.model.open:
            self.model.end(lease_id, "generation_failed")

    @rule(worker=WORKERS, picks=st.lists(PICKS, max_size=3))
    def release(self, worker, picks):
        lease_ids = [self.lease_at(pick) for pick in picks]
        ended = self.model.held_by(worker, lease_ids)
        assert self.ledger.release(worker, lease_ids) == len(ended)
        for lease_id in ended:
            self.model.end(lease_id, self.model.reason_to_hand_back(lease_id))

    @rule(worker=WORKERS)
    def set_aside(self, worker):
        self.ledger.set_aside(worker)
        self.model.set_aside(worker, self.failures_of)
        assert worker not in {group.worker_id for group in self.ledger.buffer.groups()}

    @precondition(lambda self: self.model.open)
    @rule(pick=PICKS, age=st.integers(0, 2))
    def hand_back_what_was_begun(self, pick, age):
        lease_id = list(self.model.open)[pick % len(self.model.open)]
        oldest = max(0, self.model.step - age)
        worker = self.model.open[lease_id].worker_id
        number = self.model.open[lease_id].numbers[0]
        partial = [make_partial_response(self.version(oldest), self.version(), number=number)]
        assert self.ledger.release(worker, [lease_id], partial) == 1
        self.model.end(lease_id, self.model.reason_to_hand_back(lease_id), oldest)

    @rule(num_trajectories=st.integers(0, 6))
    def preempt(self, num_trajectories):
        self.ledger.preempt(num_trajectories)
        preempted = {
            one for worker in ("left", "right") for one in self.ledger.preempted_leases(worker)
        }
        assert self.model.preempted() <= preempted <= self.model.open.keys()
        missing = sum(
            self.model.open[one].size - len(self.model.open[one].steps) for one in preempted
        )
        assert missing <= num_trajectories or preempted == self.model.preempted()
        for lease_id in preempted:
            self.model.open[lease_id].preempted = True

    @rule(seconds=st.sampled_from([0.0, TIMEOUT_S / 2, TIMEOUT_S]))
    def expire(self, seconds):
        self.clock.advance(seconds)
        expired = [one for one, it in self.model.open.items() if it.expires_s <= self.clock()]
        assert len(self.ledger.expire()) == len(expired)
        for lease_id in expired:
            self.model.end(lease_id, "lease_expired")

    @rule(limit=LIMITS)
    def drop_late(self, limit):
        self.ledger.drop_late(
            step=self.model.step, max_policy_lag_steps=MAX_LAG_STEPS, lag_limit_steps=limit
        )
        self.model.drop_late(self.failures_of, MAX_LAG_STEPS, limit)

    @rule(limit=LIMITS)
    def take_batch(self, limit):
        step = self.model.step
        batch = self.ledger.take_batch(
            step=step, max_policy_lag_steps=MAX_LAG_STEPS, lag_limit_steps=limit
        )
        expected = self.model.take(self.failures_of, MAX_LAG_STEPS, limit)
        assert (batch and [group.grant_number for group in batch]) == expected
        for group in batch or []:
            spans = [one for each in group.trajectories for one in each.version_spans]
            allowed = MAX_LAG_STEPS if limit is None else limit
            assert all(step - step_of(span.policy_version) <= allowed for span in spans)

    @rule(age=st.integers(0, 3), accuracy=st.floats(0, 1))
    def evaluate(self, age, accuracy):
        step = max(0, self.model.step - age)
        self.ledger.record_evaluation(step, accuracy)
        self.model.accuracies[step] = accuracy

    @rule(steps=st.integers(0, 3), level=st.sampled_from(WarningLevel))
    def leave_limit(self, steps, level):
        self.model.lag_limit = LagLimit(steps=steps, level=level, rollbacks=Rollbacks())
        self.ledger.record_lag_limit(self.model.lag_limit)

    @invariant()
    def evaluations_and_limit_are_those_of_the_history(self):
        assert self.ledger.accuracies == self.model.accuracies
        assert self.ledger.lag_limit == self.model.lag_limit

    @invariant()
    def every_moment_may_be_the_last_that_is_written(self):
        self.moments.append((self.log.position, deepcopy(self.model)))

    @invariant()
    def every_response_is_in_exactly_one_place(self):
        counts, tally = self.ledger.counts(), self.model.tally()
        counts.check()
        assert counts.leased == tally.total()
        assert (counts.in_flight, counts.buffered, counts.consumed) == (
            tally["in_flight"],
            tally["buffered"],
            tally["consumed"],
        )
        dropped = {reason: count for reason, count in tally.items() if reason not in PLACES}
        assert dict(counts.dropped) == dropped

    @invariant()
    def nothing_is_consumed_twice(self):
        members = [one for group in self.model.consumed.values() for one in group.members]
        assert len(set(members)) == len(members)

    @invariant()
    def each_step_has_consumed_one_batch(self):
        assert self.ledger.step == self.model.step
        assert self.ledger.counts().consumed == 4 * self.model.step

    @invariant()
    def a_version_names_one_policy_for_ever(self):
        """A policy is what the batches so far have made of it, in the process that took them."""
        policy = (self.starts, tuple(self.model.consumed))
        assert self.policies.setdefault(self.version(), policy) == policy
        assert max(self.policies) == self.version()

    @invariant()
    def flights_are_those_of_the_open_leases(self):
        flights = {"left": 0, "right": 0}
        for promise in self.model.open.values():
            flights[promise.worker_id] += promise.size - len(promise.steps)
        by_worker = self.ledger.leases.in_flight_by_worker()
        assert {worker: by_worker.get(worker, 0) for worker in flights} == flights


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
