"""A learner of several ranks: its processes start, fail and restart as one group."""

import json
import signal
from types import SimpleNamespace

import pytest

from tests.unit.local.processes.fake_processes import RUN_OF_TWO_RANKS, TIMEOUT_S, wait_for_end
from vcpo.local.processes.child import ChildProcess, first_failure, rank_variables
from vcpo.local.processes.fleet import Fleet, RunFailedError
from vcpo.local.processes.learner import LearnerProcess
from vcpo.service.lifecycle import CANNOT_START, DRAINED, RANK_LOST


@pytest.fixture
async def group(fleet, run_dir, clock):
    """A fleet whose learner has two ranks; `fleet` has made the fake processes."""
    two = Fleet(RUN_OF_TWO_RANKS, run_dir, clock=clock)
    yield two
    await two.stop(0.0)


@pytest.fixture
def learner(group, clock) -> LearnerProcess:
    return LearnerProcess(group, resume=False, spec=RUN_OF_TWO_RANKS.spec, clock=clock)


def end_rank(learner, monkeypatch, rank: int, status: int) -> None:
    """Start the ranks, of which one ends with a status."""
    monkeypatch.setenv("EXIT_RANK", str(rank))
    monkeypatch.setenv("EXIT_STATUS", str(status))
    learner.start_when_due(0)
    wait_for_end(learner.ranks[rank])


def ended(*exit_codes, hung=None):
    return [
        SimpleNamespace(exit_code=code, hung_s=60.0 * (rank == hung))
        for rank, code in enumerate(exit_codes)
    ]


def test_each_rank_is_told_its_place_and_one_port_to_meet_at(group, monkeypatch):
    monkeypatch.setenv("EXIT", "0")
    launches = [
        json.loads(wait_for_end(child).log.read_text().splitlines()[0])
        for child in group.start_learner(resume=False)
    ]
    places = [
        {name: each["environment"][name] for name in rank_variables(0, num_ranks=2, port=0)}
        for each in launches
    ]
    port = places[0]["MASTER_PORT"]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert places == [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port, **common}
        for rank in range(2)
    ]
    # Each has a ready file of its own, everything else in common, as torchrun would start them.
    arguments = [
        [one for one in each["arguments"] if not one.startswith("--ready-file=")]
        for each in launches
    ]
    assert arguments[0] == arguments[1]


def test_a_group_of_workers_called_learner_takes_no_name_of_a_rank(group):
    group.start_learner(resume=False)
    group.scale({"learner": 1}, 7600, {})
    names = [child.name for child in group.children]
    assert len(names) == len(set(names)) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_rank_fails_the_others_are_stopped_and_the_event_names_it(
    learner, group, monkeypatch, rank
):
    end_rank(learner, monkeypatch, rank, 1)
    end = learner.take_end(step=0)
    assert end.message.startswith(f"rank {rank} ended with status 1: the rank's reason (log: ")
    assert end.message.endswith("; restart 1 of 2 without progress")
    other = group.learner_ranks[1 - rank]
    other.process.wait(TIMEOUT_S)
    assert other.exit_code == -signal.SIGKILL


def test_the_ranks_start_again_together_once_all_have_ended(learner, group, monkeypatch, clock):
    end_rank(learner, monkeypatch, 1, 1)
    first = list(group.learner_ranks)
    monkeypatch.setattr(ChildProcess, "kill", lambda _: None)  # it takes its time
    learner.take_end(step=0)
    clock.now_s += 60.0
    learner.start_when_due(0)
    assert not learner.ranks  # rank 0 still runs
    first[0].process.kill()
    wait_for_end(first[0])
    monkeypatch.delenv("EXIT_RANK")
    learner.start_when_due(0)
    assert len(learner.ranks) == 2
    assert all(child not in first for child in learner.ranks)


def test_the_failure_of_a_group_is_one_restart(learner, monkeypatch, clock):
    for _ in range(2):
        clock.now_s += 60.0
        end_rank(learner, monkeypatch, 1, 1)
        for child in learner.ranks:
            child.kill()
            wait_for_end(child)
        learner.take_end(step=0)
        assert learner.take_end(step=0) is None
    clock.now_s += 60.0
    end_rank(learner, monkeypatch, 1, 1)
    with pytest.raises(RunFailedError, match=r"3 times in a row .* The last time rank 1 ended"):
        learner.take_end(step=0)


def test_what_the_user_must_correct_ends_the_run_whichever_rank_says_it(learner, monkeypatch):
    end_rank(learner, monkeypatch, 1, CANNOT_START)
    with pytest.raises(RunFailedError, match=r"^rank 1 cannot start: the rank's reason"):
        learner.take_end(step=0)


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        (ended(None, None), None),
        (ended(0, 0), None),
        (ended(None, 1), 1),
        (ended(RANK_LOST, -signal.SIGKILL), 1),
        (ended(-signal.SIGABRT, -signal.SIGSEGV), 1),
        (ended(RANK_LOST, 1, RANK_LOST), 1),
        (ended(-signal.SIGKILL, 1, -signal.SIGKILL, hung=2), 2),
        (ended(RANK_LOST, RANK_LOST), 0),
        (ended(DRAINED, 0), 0),
    ],
)
def test_the_cause_is_the_rank_that_the_others_lost(ranks, cause):
    assert first_failure(ranks) == cause
