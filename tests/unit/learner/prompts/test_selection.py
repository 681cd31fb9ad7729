"""The order of prompt indices, also across a restart, and the teacher that chooses them."""

import io
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import make_run, make_trajectory
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.prompts.source import SequentialPrompts, TeacherPrompts, candidates, prompt_source
from vcpo_learner.prompts.teacher import PromptTeacher, TeacherSettings, undecidedness


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


UNDECIDED, SOLVED, UNSOLVED = (1, 2, 3), (4, 5), (6, 7, 8, 9)


def make_teacher(*, seed=0, **changes):
    return PromptTeacher(TeacherSettings(**changes), vocabulary_size=16, seed=seed)


def taught(*, steps=150, **changes):
    """A teacher that saw one prompt half solved, one always and one never."""
    teacher = make_teacher(**changes)
    for prompt, successes in ((UNDECIDED, 4), (SOLVED, 8), (UNSOLVED, 0)):
        teacher.observe(prompt, successes, 8)
    for _ in range(steps):
        teacher.train_step()
    return teacher


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [(4, 16, 0.4330127), (8, 16, 0.5), (0, 16, 0.0), (16, 16, 0.0), (0.5, 1, 0.5)],
    ids=["a quarter", "half", "none", "all", "half a success"],
)
def test_the_target_is_the_spread_of_the_responses(successes, trials, expected):
    assert undecidedness(successes, trials) == pytest.approx(expected, abs=1e-7)


def test_it_learns_which_prompt_is_undecided():
    undecided, solved, unsolved = taught().scores([UNDECIDED, SOLVED, UNSOLVED])
    assert undecided > 0.45
    assert max(solved, unsolved) < 0.05


def test_a_score_is_half_the_sigmoid_of_the_weighted_mean_embedding():
    teacher = taught(steps=20)
    network = teacher.state_dict()["network"]
    mean = (network["embedding.weight"][1] + network["embedding.weight"][5]) / 2
    expected = 0.5 / (1.0 + math.exp(-float(mean @ network["weight"])))
    assert teacher.scores([(1, 5)]) == pytest.approx([expected], rel=1e-5)


def test_a_step_returns_the_squared_error_before_it():
    teacher = make_teacher()
    teacher.observe(UNDECIDED, 4, 8)
    # (1/4 - 1/2)^2
    assert teacher.train_step() == pytest.approx(0.0625)


def test_what_left_the_window_is_not_learned_from():
    teacher = make_teacher(window=2)
    for successes in (4, 8, 8):
        teacher.observe(UNDECIDED, successes, 8)
    for _ in range(150):
        teacher.train_step()
    assert teacher.scores([UNDECIDED])[0] < 0.05


def test_the_highest_score_is_chosen():
    teacher = taught(exploration=0.0)
    prompts = [SOLVED, UNDECIDED, UNSOLVED]
    assert {teacher.choose(prompts, random.Random(seed)) for seed in range(50)} == {1}


def test_exploration_chooses_uniformly():
    teacher, rng = taught(exploration=1.0), random.Random(0)
    chosen = [teacher.choose([SOLVED, UNDECIDED], rng) for _ in range(2000)]
    assert chosen.count(0) == pytest.approx(1000, abs=112)


def test_a_restored_teacher_continues_like_the_saved_one():
    teacher = taught(steps=5)
    restored = make_teacher(seed=99)
    restored.observe(SOLVED, 1, 8)  # its own past is replaced
    restored.load_state_dict(through_a_file(teacher.state_dict()))
    assert [restored.train_step() for _ in range(5)] == [teacher.train_step() for _ in range(5)]
    assert restored.scores([UNDECIDED]) == teacher.scores([UNDECIDED])
