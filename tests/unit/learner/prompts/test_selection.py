"""The order of prompt indices, also across a restart."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import make_run, make_trajectory
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.prompts.selection import (
    TeacherPrompts,
    candidates,
    prompt_source,
)
from vcpo_learner.prompts.source import SequentialPrompts


def small_teacher(pool, *, seed=0):
    return TeacherPrompts(pool, seed=seed, num_rows=16)


def observe(source, prompt_index, rewards, *, versions=(0,)):
    """Report responses to the prompt of this index to a source."""
    source.observe(
        prompt_index,
        [
            replace(
                make_trajectory("lease", number, reward=reward, versions=versions),
                prompt_token_ids=(prompt_index + 1, 0),
            )
            for number, reward in enumerate(rewards)
        ],
    )


def choices(source, count, in_flight=()):
    return [source.next_prompt(in_flight) for _ in range(count)]


def through_bytes(source):
    snapshot = ledger_pb2.LedgerSnapshot()
    source.save(snapshot)
    return ledger_pb2.LedgerSnapshot.FromString(snapshot.SerializeToString())


def test_a_pool_is_gone_round_in_order():
    assert choices(SequentialPrompts(3), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_the_round_continues_after_a_restart():
    source, later = SequentialPrompts(3), SequentialPrompts(3)
    choices(source, 4)
    later.restore(through_bytes(source))
    assert choices(later, 3) == [1, 2, 0]


@given(pool=st.integers(1, 40), in_flight=st.sets(st.integers(0, 39)), seed=st.integers(0, 99))
def test_candidates_are_different_free_prompts_and_as_many_as_there_may_be(pool, in_flight, seed):
    drawn = candidates(pool, in_flight, random.Random(seed))
    free = set(range(pool)) - in_flight
    assert set(drawn) <= free
    assert len(drawn) == len(set(drawn)) == min(16, len(free))


def test_the_undecided_prompt_is_chosen_most_of_the_time():
    source = small_teacher(3)
    choices(source, 3)
    for _ in range(60):
        for index, rewards in enumerate([[1.0, 0.0] * 4, [1.0] * 8, [0.0] * 8]):
            observe(source, index, rewards)
    # A tenth of the choices is blind, and a third of those finds it too: 0.93.
    assert choices(source, 300).count(0) > 250


def test_choices_after_a_restart_are_those_that_would_have_come():
    source, later = small_teacher(40), small_teacher(40, seed=1)
    for index in choices(source, 60):
        observe(source, index, [1.0, float(index % 2)])
    later.restore(through_bytes(source))
    observe(later, 3, [0.0, 1.0])
    observe(source, 3, [0.0, 1.0])
    assert choices(later, 50, {7, 8}) == choices(source, 50, {7, 8})


def test_what_another_kind_of_source_saved_is_no_evidence():
    later, fresh = small_teacher(9), small_teacher(9)
    counted = SequentialPrompts(9)
    choices(counted, 5)
    later.restore(through_bytes(counted))
    assert choices(later, 20) == choices(fresh, 20)


def test_a_teacher_passes_over_unseen_prompts_that_are_in_flight():
    assert choices(small_teacher(4), 2, {0, 2}) == [1, 3]


def test_a_teacher_avoids_prompts_that_nobody_could_solve():
    source = small_teacher(6)
    choices(source, 6)
    observe(source, 4, [1.0, 0.0])
    assert choices(source, 30) == [4] * 30


def test_a_teacher_that_knows_no_text_still_grants_prompts():
    source = small_teacher(6)
    choices(source, 6)
    assert set(choices(source, 100, {0})) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        ({}, SequentialPrompts),
        ({"promptPool": 9}, SequentialPrompts),
        ({"promptPool": 9, "promptSelection": "teacher"}, TeacherPrompts),
    ],
)
def test_a_run_has_the_source_that_it_names(batch, kind):
    source = prompt_source(make_run(batch=batch).spec)
    assert isinstance(source, kind)
    assert source.next_prompt(()) in range(9)
