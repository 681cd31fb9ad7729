import io
import math
import random

import pytest
import torch

from vcpo_learner.prompts.teacher import PromptTeacher, TeacherSettings, undecidedness

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
