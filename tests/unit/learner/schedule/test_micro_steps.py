"""Which rank runs which trajectories: every property for any lengths, budgets and meshes."""

from collections import Counter
from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from vcpo_learner.schedule.micro_steps import (
    MicroBatchBudget,
    fit,
    group_micro_steps,
    micro_steps,
)

LENGTHS = st.lists(st.integers(1, 50), max_size=30)
GROUPS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=9), min_size=1, max_size=12)
BUDGETS = st.builds(
    MicroBatchBudget,
    trajectories=st.integers(1, 9),
    tokens=st.none() | st.integers(1, 200),
    groups=st.none() | st.integers(1, 3),
    counts_padding=st.booleans(),
)
RANKS = st.integers(1, 5)
UNLIMITED = MicroBatchBudget(trajectories=10**6)


def computed_tokens(lengths, budget):
    """What a forward pass computes: a rectangle as long as the longest, or just the tokens."""
    if not lengths:
        return 0
    return len(lengths) * max(lengths) if budget.counts_padding else sum(lengths)


def is_within(lengths, budget):
    tokens = budget.tokens or 10**9
    return len(lengths) <= 1 or (
        len(lengths) <= budget.trajectories and computed_tokens(lengths, budget) <= tokens
    )


def partitions(numbers, most):
    """Every way to put numbers into at most so many parts."""
    if not numbers:
        yield []
        return
    *rest, last = numbers
    for parts in partitions(rest, most):
        for index in range(len(parts)):
            yield [[*part, last] if at == index else part for at, part in enumerate(parts)]
        if len(parts) < most:
            yield [*parts, [last]]


def test_a_trajectory_alone_may_be_longer_than_the_budget():
    budget = MicroBatchBudget(trajectories=4, tokens=10)
    assert micro_steps([20, 5, 5, 5], 1, budget) == [[[1, 2]], [[3]], [[0]]]


def test_one_rank_fills_each_micro_batch_with_the_shortest_first():
    budget = MicroBatchBudget(trajectories=2)
    assert micro_steps([5, 1, 4, 2, 3], 1, budget) == [[[1, 3]], [[4, 2]], [[0]]]


def test_ranks_share_what_one_of_them_could_hold():
    # Padded, the long one costs as much as the three short ones together.
    assert micro_steps([10, 30, 10, 10], 2, UNLIMITED) == [[[0, 2, 3], [1]]]


def test_a_rank_without_a_trajectory_is_idle_and_stays_in_step():
    assert micro_steps([3, 3, 3], 4, UNLIMITED) == [[[0], [1], [2], []]]
    assert micro_steps([], 4, UNLIMITED) == []


@given(LENGTHS, RANKS, BUDGETS)
def test_every_trajectory_is_in_one_micro_batch_within_the_budget(lengths, num_ranks, budget):
    steps = micro_steps(lengths, num_ranks, budget)
    assert all(len(step) == num_ranks for step in steps)
    parts = list(chain.from_iterable(steps))
    assert sorted(chain.from_iterable(parts)) == list(range(len(lengths)))
    assert all(is_within([lengths[at] for at in part], budget) for part in parts)
    assert all(any(step) for step in steps)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.integers(2, 3),
    st.integers(1, 6),
    st.integers(1, 60),
)
def test_no_split_into_as_many_micro_batches_has_a_smaller_largest_one(
    lengths, num_ranks, trajectories, tokens
):
    budget = MicroBatchBudget(trajectories=trajectories, tokens=tokens)
    steps = micro_steps(lengths, num_ranks, budget)
    parts = [[lengths[at] for at in part] for part in chain.from_iterable(steps)]
    found = max(computed_tokens(part, budget) for part in parts)
    for other in partitions(lengths, len(parts)):
        if all(is_within(part, budget) for part in other):
            assert found <= max(computed_tokens(part, budget) for part in other)


@given(GROUPS, st.integers(1, 3), st.integers(1, 4), BUDGETS)
def test_every_trajectory_of_a_group_is_in_one_shard_of_one_replica(
    groups, num_replicas, num_shards, budget
):
    found = Counter()
    replicas_of_group = [set() for _ in groups]
    for replica, steps in enumerate(group_micro_steps(groups, num_replicas, num_shards, budget)):
        for step in steps:
            for members in step.shards:
                assert list(map(sorted, members)) == list(map(list, members))
                for number, chosen in zip(step.groups, members, strict=True):
                    replicas_of_group[number].add(replica)
                    found.update((number, at) for at in chosen)
    expected = [(number, at) for number, group in enumerate(groups) for at in range(len(group))]
    assert found == Counter(expected)
    assert all(len(replicas) == 1 for replicas in replicas_of_group)


@given(GROUPS, st.integers(1, 3), st.integers(1, 4), BUDGETS)
def test_all_ranks_have_as_many_micro_steps_each_within_the_budget(
    groups, num_replicas, num_shards, budget
):
    replicas = group_micro_steps(groups, num_replicas, num_shards, budget)
    assert len(replicas) == num_replicas
    assert len({len(steps) for steps in replicas}) == 1
    for step in chain.from_iterable(replicas):
        assert len(step.shards) == num_shards
        assert budget.groups is None or len(step.groups) <= budget.groups
        for members in step.shards:
            rows = zip(step.groups, members, strict=True)
            assert is_within([groups[number][at] for number, own in rows for at in own], budget)


@given(GROUPS, st.integers(1, 3), st.integers(1, 4), BUDGETS)
def test_a_group_that_fits_is_whole_and_another_is_alone_until_it_is_complete(
    groups, num_replicas, num_shards, budget
):
    for steps in group_micro_steps(groups, num_replicas, num_shards, budget):
        open_group = None
        for step in steps:
            if open_group is not None:
                assert step.groups == (open_group,)
            if not step.is_last or open_group is not None:
                (only,) = step.groups
                assert not fit([groups[only]], num_shards, budget)
                open_group = None if step.is_last else only
                continue
            for slot, number in enumerate(step.groups):
                own = chain.from_iterable(members[slot] for members in step.shards)
                assert sorted(own) == list(range(len(groups[number])))
        assert open_group is None


@given(GROUPS, st.integers(1, 12))
def test_one_rank_takes_whole_groups_shortest_first_while_they_fit(groups, trajectories):
    groups = [group[:trajectories] for group in groups]
    (steps,) = group_micro_steps(groups, 1, 1, MicroBatchBudget(trajectories=trajectories))
    assert all(step.is_last for step in steps)
    order = [number for step in steps for number in step.groups]
    assert order == sorted(range(len(groups)), key=lambda number: max(groups[number]))
    for step in steps:
        assert step.shards == (tuple(tuple(range(len(groups[at]))) for at in step.groups),)
    for step, following in pairwise(steps):
        count = sum(len(groups[number]) for number in step.groups)
        assert count + len(groups[following.groups[0]]) > trajectories


def test_replicas_that_are_done_wait_in_idle_micro_steps():
    budget = MicroBatchBudget(trajectories=1)
    first, second = group_micro_steps([[9], [1], [1], [1]], 2, 1, budget)
    assert [step.groups for step in first] == [(0,), (), ()]
    assert [step.groups for step in second] == [(1,), (2,), (3,)]
    assert first[1].shards == ((),)


def test_a_group_larger_than_all_shards_hold_goes_on_in_the_next_micro_step():
    budget = MicroBatchBudget(trajectories=1)
    ((first, second),) = group_micro_steps([[1, 2, 3]], 1, 2, budget)
    assert (first.shards, first.is_last) == ((((0,),), ((1,),)), False)
    assert (second.shards, second.is_last) == ((((2,),), ((),)), True)
