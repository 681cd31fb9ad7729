"""How many ranks a learner has, what each of them is, and how it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.fixtures.learner.options import options
from tests.fixtures.learner.updates import spec_of
from vcpo.api.learner import Learner
from vcpo.service.lifecycle import (
    CANNOT_START,
    RANK_LOST,
    StartError,
)
from vcpo.service.logs import END_VARIABLE
from vcpo.wire.phase import RunPhase
from vcpo_learner import __main__ as program
from vcpo_learner.follower import _own_port
from vcpo_learner.ranks.environment import RankEnvironment
from vcpo_learner.ranks.ranks import LostRankError
from vcpo_learner.training import policy_on_ranks
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks, _set_threads, require_ranks

RANK_1 = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "VCPO_STEERING_KEY": "a key",
}


@pytest.mark.parametrize(
    ("learner", "started", "field", "asked", "command"),
    [
        ({"processes": 2}, 1, "processes", "1 x 2", "--nproc-per-node 2"),
        ({"replicas": 2, "processes": 8}, 8, "processes", "2 x 8", "--nnodes 2 --nproc-per-node 8"),
    ],
)
def test_another_number_of_ranks_than_the_specs_is_refused_with_the_cure(
    learner, started, field, asked, command
):
    with pytest.raises(StartError) as refused:
        require_ranks(Learner.model_validate(learner), RankEnvironment(size=started))
    assert str(refused.value).startswith(f"spec.learner.{field}: {asked} ranks are asked for")
    assert f"torchrun {command} -m vcpo_learner" in str(refused.value)


@pytest.mark.parametrize(
    ("learner", "size", "threads"),
    [
        ({"threads": 3, "processes": 2}, 2, 3),
        ({"processes": 2}, 2, 4),
        ({"processes": 16}, 16, 1),
        ({"replicas": 2, "processes": 2}, 4, 4),
    ],
)
def test_ranks_of_one_machine_share_its_cores(learner, size, threads, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    _set_threads(Learner.model_validate(learner), RankEnvironment(size=size))
    assert chosen == [threads]


@pytest.mark.parametrize(("local_rank", "address"), [(0, "0.0.0.0:7600"), (3, "0.0.0.0:0")])
def test_the_first_rank_of_a_pod_answers_its_probes(local_rank, address):
    environment = RankEnvironment(rank=8 + local_rank, size=16, local_rank=local_rank)
    assert _own_port("0.0.0.0:7600", environment) == address


@pytest.mark.parametrize(
    ("weights_listen", "addresses"),
    [
        ("0.0.0.0:7620", ["0.0.0.0:7620", "0.0.0.0:7621", "0.0.0.0:7622"]),
        ("127.0.0.1:0", ["127.0.0.1:0"] * 3),
        (None, ["0.0.0.0:0"] * 3),
    ],
)
def test_each_rank_of_a_pod_sends_weights_at_a_port_of_its_own(weights_listen, addresses):
    given = options(Path(), listen="0.0.0.0:7600", weights_listen=weights_listen, plain_text=True)
    assert [given._weights_address(number) for number in range(3)] == addresses


@pytest.fixture
def start(monkeypatch):
    """Starts the command line as rank 1; `outcome` is what its work does."""
    monkeypatch.setattr(sys, "argv", ["vcpo_learner", "run.yaml", "--run-dir=r"])
    for name, value in RANK_1.items():
        monkeypatch.setenv(name, value)

    def start(outcome: Exception | None) -> int:
        async def run(*_: object) -> RunPhase:
            if outcome is not None:
                raise outcome
            return RunPhase.COMPLETE

        monkeypatch.setattr(program, "run_learner", pytest.fail)
        monkeypatch.setattr(program, "run_follower", run)
        return program.main()

    return start


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (None, 0),
        (StartError("spec.model.name: no such model"), CANNOT_START),
        (LostRankError("rank 0 is gone"), RANK_LOST),
    ],
)
def test_the_exit_status_of_a_follower_tells_its_own_failure_from_that_of_another_rank(
    start, outcome, status
):
    assert start(outcome) == status


@pytest.mark.parametrize("error", [LostRankError("rank 1 is gone"), StartError("no model")])
def test_the_cause_of_the_end_is_left_where_the_kubelet_reads_it(
    start, error, tmp_path, monkeypatch
):
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setenv(END_VARIABLE, str(log))
    start(error)
    assert log.read_text() == str(error)


def test_a_gpu_without_room_for_the_parameters_is_named_with_the_cure(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And more.")

    monkeypatch.setattr(policy_on_ranks, "load_on_ranks", full)
    with pytest.raises(StartError, match=r"spec\.model\.name: .*2\.00 GiB.*gpusPerReplica"):
        PolicyOnRanks.load(spec_of("vcpo2"), RankEnvironment())
