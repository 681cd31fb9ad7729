"""The tasks of the conditions."""

from __future__ import annotations

import pytest

from research.tasks import CopyDigits, SortSome
from vcpo_rollout.environments import Split


def answers(task: SortSome, split: Split) -> list[float]:
    prompts = [task.prompt(split, index) for index in range(200)]
    return [task.reward(prompt, "".join(sorted(prompt.text[5:-1]))) for prompt in prompts]


def test_of_the_training_prompts_the_given_share_has_no_right_answer():
    task = SortSome(seed=3, style="plain", digits=9, unsolvable_percent=25)
    # Of 200 prompts 150, within four standard deviations of 6.
    assert sum(answers(task, Split.TRAIN)) == pytest.approx(150, abs=24)


def test_every_held_out_prompt_has_its_answer():
    task = SortSome(seed=3, style="plain", digits=9, unsolvable_percent=100)
    assert sum(answers(task, Split.EVALUATION)) == 200
    assert sum(answers(task, Split.TRAIN)) == 0


def test_a_wrong_answer_earns_nothing():
    task = SortSome(seed=3, style="plain", digits=9, unsolvable_percent=0)
    assert task.reward(task.prompt(Split.TRAIN, 0), "1") == 0.0


def test_a_share_beyond_all_is_refused():
    with pytest.raises(ValueError, match="unsolvable_percent"):
        SortSome(seed=3, unsolvable_percent=101)


def test_a_copy_is_right_to_the_last_digit_or_not_at_all():
    task = CopyDigits(seed=3, digits=128)
    prompt = task.prompt(Split.TRAIN, 0)
    digits = prompt.text.removeprefix("copy ").removesuffix("=")
    assert len(digits) == 128
    assert task.reward(prompt, digits) == 1.0
    assert task.reward(prompt, digits[:-1]) == 0.0


def test_a_copy_that_fits_no_model_is_refused():
    with pytest.raises(ValueError, match="digits"):
        CopyDigits(seed=3, digits=241)
