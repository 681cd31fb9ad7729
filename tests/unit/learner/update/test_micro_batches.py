"""What each rank of a mesh runs, with real trajectories."""

from itertools import chain

import pytest
import torch

from tests.fixtures.learner.models import PAD, llama, sampled_groups, seeded_model
from tests.fixtures.learner.updates import make_spec, with_micro_batches
from vcpo_learner.forward.token_batch import batch_tokens
from vcpo_learner.schedule.micro_steps import MeshPlace
from vcpo_learner.schedule.token_budget import MemoryBudget
from vcpo_learner.update.micro_batches import MicroBatchRunner

MODEL = seeded_model(llama)
TRAJECTORIES = list(chain.from_iterable(sampled_groups(MODEL)))
TOKENS = batch_tokens(TRAJECTORIES, torch.device("cpu"))
POSITIONS = range(len(TRAJECTORIES))
GROUPS = [POSITIONS[0:4], POSITIONS[4:8], POSITIONS[8:12]]


def runner(*, micro_batch=64, tokens=None, memory=None, **place):
    spec = with_micro_batches(make_spec(), micro_batch)
    batch = spec.batch.model_copy(update={"tokens_per_micro_batch": tokens})
    return MicroBatchRunner(
        MODEL, spec.model_copy(update={"batch": batch}), PAD, MeshPlace(**place), memory
    )


def on_every_rank(num_replicas, num_shards, **settings):
    return [
        runner(
            num_replicas=num_replicas,
            num_shards=num_shards,
            replica=replica,
            shard=shard,
            **settings,
        )
        for replica in range(num_replicas)
        for shard in range(num_shards)
    ]


def test_the_ranks_together_score_every_trajectory_once():
    expected = next(runner().split(TOKENS, POSITIONS))
    scored = dict(zip(expected.positions, runner().logprobs(expected.batch), strict=True))
    found = {}
    for each in on_every_rank(2, 2, micro_batch=2):
        for step in each.split(TOKENS, POSITIONS):
            rows = () if step.is_idle else each.logprobs(step.batch)
            for at, row in zip(step.positions, rows, strict=True):
                assert at not in found
                found[at] = row
    assert sorted(found) == list(POSITIONS)
    for at, row in found.items():
        torch.testing.assert_close(row, scored[at][: len(row)])
        assert not scored[at][len(row) :].any()


def test_an_idle_rank_runs_the_shortest_trajectory_and_counts_it_nowhere():
    lengths = TOKENS.num_tokens
    steps = [next(each.split(TOKENS, [2, 5])) for each in on_every_rank(1, 3)]
    assert [step.is_idle for step in steps] == [False, False, True]
    idle = steps[-1]
    shortest = min([2, 5], key=lambda at: lengths[at])
    assert idle.batch.input_ids.tolist() == [TOKENS.token_ids[shortest].tolist()]
    assert list(idle.positions) == []
    logprobs = runner().logprobs(idle.batch)
    assert len(idle.select_trained(logprobs)) == 0
    assert not idle.place_trained(torch.ones(0)).any()
    assert idle.place_trained(torch.ones(0)).shape == logprobs.shape


def test_a_group_longer_than_the_budget_of_tokens_is_not_held_whole():
    tokens = sum(TOKENS.num_tokens[at] for at in GROUPS[0])
    assert not runner(tokens=tokens // 2).holds_each(TOKENS, GROUPS)
    assert runner(tokens=4 * max(TOKENS.num_tokens)).holds_each(TOKENS, GROUPS)
    steps = list(runner(tokens=tokens // 2).split_groups(TOKENS, [GROUPS[0]]))
    assert [step.is_last for step in steps] == [False] * (len(steps) - 1) + [True]
    assert len(steps) > 1


def test_free_memory_sets_what_the_spec_leaves_open():
    memory = MemoryBudget(tokens=1, groups=1)
    steps = list(runner(memory=memory).split(TOKENS, POSITIONS))
    assert [len(step.positions) for step in steps] == [1] * len(TRAJECTORIES)
    steps = list(runner(memory=memory, tokens=10**6).split_groups(TOKENS, GROUPS))
    assert sorted(list(step.numbers) for step in steps) == [[0], [1], [2]]


def test_only_a_cpu_bounds_the_trajectories_that_the_spec_leaves_open():
    positions = [0] * 100
    on_gpu = MemoryBudget(tokens=10**6, groups=1)
    sizes = [
        [len(step.positions) for step in each.split(TOKENS, positions)]
        for each in (runner(micro_batch=None), runner(micro_batch=None, memory=on_gpu))
    ]
    assert (max(sizes[0]), sizes[1]) == (64, [100])


@pytest.mark.parametrize(("tokens", "fits"), [(1, False), (None, True)])
def test_a_graph_is_kept_only_of_what_one_micro_batch_holds(tokens, fits):
    assert runner(tokens=tokens).fits_one(TOKENS, POSITIONS) is fits
