"""Peer assignment: the learner sends little, no cycle forms, and no worker is stuck."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import ManualClock
from vcpo_learner.ledger.worker_registry import WORKER_LOST_AFTER_S, WorkerRegistry
from vcpo_learner.weights.peer_assignment import PeerAssignment, serving_address


class Workers:
    """Workers that fetch, and that serve under their own names."""

    def __init__(self):
        self.clock = ManualClock()
        self.registry = WorkerRegistry(self.clock)
        self.assignment = PeerAssignment(self.registry)

    def ask(self, worker, *, version=1, base=None, held=None, serves=True):
        self.assignment.register(worker, worker if serves else "", held)
        return self.assignment.assign(worker, policy_version=version, base_version=base)

    def hold(self, worker, version):
        """A worker that holds a version waits for the next one."""
        self.assignment.register(worker, worker, version)


@pytest.fixture
def workers():
    return Workers()


def test_two_fetch_from_the_learner_and_everybody_else_from_earlier_workers(workers):
    sources = [workers.ask(worker) for worker in "abcdefg"]
    assert sources == ["", "", "a", "a", "b", "b", "c"]


@given(st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=80))
def test_the_learner_sends_each_way_twice_at_most_and_every_chain_ends_at_it(bases):
    workers, asked = Workers(), []
    for number, base in enumerate(bases):
        source = workers.ask(f"w{number}", version=3, base=base)
        asked.append((f"w{number}", base))
        assert source == "" or (source, base) in asked[:-1]
        if source == "":
            assert sum(one[1] == base for one in asked) <= 2


def test_a_delta_comes_from_one_who_fetches_the_same_delta(workers):
    for worker in "abc":
        workers.ask(worker, version=5, base=4)
    assert [workers.ask(worker, version=5, base=3) for worker in "xyz"] == ["", "", "x"]


def test_a_late_joiner_gets_the_full_set_from_one_who_holds_it(workers):
    workers.ask("a", version=5, base=4)
    workers.hold("a", 5)
    assert workers.ask("late", version=5) == "a"


def test_those_who_hold_a_version_share_the_late_joiners_and_then_others_help(workers):
    for worker in "ab":
        workers.ask(worker, version=5, base=4)
        workers.hold(worker, 5)
    sources = [workers.ask(f"late{number}", version=5) for number in range(7)]
    assert sources == ["a", "a", "b", "b", "", "", "late0"]


def test_whoever_asks_twice_for_a_version_is_sent_to_the_learner(workers):
    for worker in "abc":
        workers.ask(worker)
    assert workers.ask("c") == ""


def test_when_a_source_fails_there_are_three_others_that_hold_the_version_or_asked_before(workers):
    for worker in "abcdef":
        workers.ask(worker)
    workers.hold("f", 1)
    assert workers.assignment.fallbacks("e", base_version=None) == ["f", "d", "c"]
    assert workers.assignment.fallbacks("a", base_version=None) == ["f"]


def test_workers_that_the_registry_has_no_room_for_are_forgotten():
    workers = PeerAssignment(WorkerRegistry(ManualClock(), max_workers=3))
    for number in range(1000):
        workers.register(f"w{number}", f"w{number}", None)
        workers.assign(f"w{number}", policy_version=1, base_version=None)
    assert workers._assigned == set(workers._routes[None].children) == {"w997", "w998", "w999"}


def test_an_answer_asks_for_few_of_a_thousand_workers(workers, monkeypatch):
    asked = []
    address_of = WorkerRegistry.serving_address
    monkeypatch.setattr(
        WorkerRegistry,
        "serving_address",
        lambda self, worker: asked.append(worker) or address_of(self, worker),
    )
    for number in range(1000):
        asked.clear()
        workers.ask(f"w{number}")
        workers.assignment.fallbacks(f"w{number}", base_version=None)
        assert len(asked) <= 5  # its own, its parent's, and three others


def test_nobody_is_sent_to_itself(workers):
    workers.ask("a", version=5, base=4)
    workers.ask("b", version=5, base=4)
    workers.hold("c", 5)
    assert workers.ask("c", version=5) == ""
    assert "c" not in workers.assignment.fallbacks("c", base_version=None)


def test_nobody_is_sent_to_a_worker_that_shut_down(workers):
    for worker in "ab":
        workers.ask(worker)
    workers.registry.deregister("a")
    assert [workers.ask(worker) for worker in "cd"] == ["b", "b"]


def test_lost_workers_take_no_room(workers):
    for number in range(100):
        workers.clock.advance(WORKER_LOST_AFTER_S + 1)
        workers.ask(f"w{number}")
    assert len(workers.assignment._assigned) == len(workers.assignment._routes[None].children) == 1


def test_the_next_version_is_another_question(workers):
    for worker in "abc":
        workers.ask(worker, version=1)
    assert [workers.ask(worker, version=2, base=1) for worker in "cab"] == ["", "", "c"]


def test_nobody_is_sent_to_a_worker_that_does_not_serve(workers):
    assert [workers.ask(worker, serves=False) for worker in "abc"] == ["", "", ""]


def test_a_lost_worker_is_no_source(workers):
    workers.ask("a")
    workers.ask("b")
    workers.clock.now_s += WORKER_LOST_AFTER_S + 1
    assert workers.ask("c") == ""


def test_a_holder_of_an_older_version_is_no_source_of_the_newest(workers):
    workers.ask("a", version=2)
    workers.hold("a", 1)
    workers.ask("b", version=2)
    assert workers.ask("late", version=2) == "a"


@pytest.mark.parametrize(
    ("caller", "port", "address"),
    [
        ("ipv4:10.0.0.7:41234", 7610, "10.0.0.7:7610"),
        ("ipv6:[fd00::7]:41234", 7610, "[fd00::7]:7610"),
        ("ipv6:%5Bfd00::7%5D:41234", 7610, "[fd00::7]:7610"),
        ("ipv4:10.0.0.7:41234", 0, ""),
        ("unix:/run/learner", 7610, ""),
        ("", 7610, ""),
    ],
)
def test_a_worker_serves_where_it_calls_from(caller, port, address):
    assert serving_address(caller, port) == address
