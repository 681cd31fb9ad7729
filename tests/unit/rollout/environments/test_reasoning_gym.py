"""Generated tasks of reasoning-gym, where the library is installed."""

import inspect
import json
import re
from pathlib import Path

import pytest

from vcpo_rollout.environments import Prompt, Split, make_environment
from vcpo_rollout.environments.reasoning_gym import judge_process

pytest.importorskip("reasoning_gym")

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
INSTRUCTION = "\n\nGive the final answer alone in <answer> tags."


def make(name, *, seed=7, **parameters):
    return make_environment(f"reasoning_gym:{name}", parameters, seed)


@pytest.fixture(scope="module")
def sums():
    return make("chain_sum", config=SMALL)


@pytest.fixture(scope="module")
def countdown():
    return make("countdown", config={"min_numbers": 3, "max_numbers": 3}, style="plain")


def test_a_prompt_is_a_question_of_the_library_and_how_to_answer(sums):
    text = sums.prompt(Split.TRAIN, 0).text
    assert text.startswith("State the final answer to the following arithmetic problem: ")
    assert text.endswith(INSTRUCTION)
    assert sums.prompt(Split.TRAIN, 0).text == text


def test_prompts_are_those_of_seed_split_and_index(sums):
    again, other = make("chain_sum", config=SMALL), make("chain_sum", config=SMALL, seed=8)
    prompts = [sums.prompt(Split.TRAIN, index) for index in range(20)]
    assert prompts == [again.prompt(Split.TRAIN, index) for index in range(20)]
    assert prompts != [other.prompt(Split.TRAIN, index) for index in range(20)]


def test_no_question_is_in_both_splits_also_of_a_small_task(sums):
    drawn = {split: {sums.prompt(split, index).text for index in range(150)} for split in Split}
    assert len(drawn[Split.EVALUATION]) > 10
    assert not drawn[Split.TRAIN] & drawn[Split.EVALUATION]


def value_of(prompt):
    return eval(prompt.text.removesuffix(INSTRUCTION).partition(": ")[2].removesuffix(" ="))


def test_the_librarys_scorer_judges_the_text_in_the_last_tags(sums):
    prompt = sums.prompt(Split.TRAIN, 3)
    right = value_of(prompt)
    assert sums.reward(prompt, f"<answer>0x</answer> no: <answer> {right} </answer>.") == 1.0
    assert sums.reward(prompt, f"<answer>{right}.00</answer>") == 1.0  # as this scorer allows
    assert sums.reward(prompt, f"<answer>{right + 1000}</answer>") in (0.0, 0.25)
    assert sums.reward(prompt, f"It is {right}.") == 0.0


def test_a_plain_response_is_its_answer():
    sums = make("chain_sum", config=SMALL, style="plain")
    prompt = sums.prompt(Split.EVALUATION, 0)
    assert INSTRUCTION not in prompt.text
    assert sums.reward(prompt, f" {value_of(prompt)}\n") == 1.0


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("countdown", {"min_numbers": 3, "max_numbers": 3}),  # sympy evaluates its answers
        ("n_queens", {"n": 6, "min_remove": 1, "max_remove": 2}),  # `eval` does
    ],
)
def test_an_answer_that_is_a_program_neither_runs_nor_scores(name, config, tmp_path):
    task, mark = make(name, config=config, style="plain"), tmp_path / "mark"
    tmp_path.chmod(0o777)
    attack = f"open({json.dumps(str(mark))}, 'w').write('x')"
    assert task.reward(task.prompt(Split.TRAIN, 0), attack) < 0.1
    assert not mark.exists()


def test_every_scorer_that_evaluates_python_is_known():
    from reasoning_gym.factory import DATASETS

    evaluates = re.compile(r"\b(?:eval|exec|parse_expr|sympify|lambdify)\(")
    found = {
        name
        for name, (dataset, _) in DATASETS.items()
        if evaluates.search(inspect.getsource(dataset.score_answer))
    }
    assert found == judge_process._LITERALS | judge_process._FORMULAS


def test_an_answer_changes_nothing_for_the_next_one(countdown):
    prompt = countdown.prompt(Split.TRAIN, 0)
    countdown.reward(prompt, "exit(1)")
    process = countdown._judge.process
    countdown.reward(prompt, "1 + 1")
    assert countdown._judge.process is process
    assert process.poll() is None


def test_an_item_that_another_process_would_not_make_is_never_scored(sums):
    prompt = sums.prompt(Split.TRAIN, 0)
    other = Prompt(text=prompt.text, metadata={"index": 0, "sum": "0123456789abcdef"})
    with pytest.raises(RuntimeError, match="'chain_sum' has other items in another process"):
        sums.reward(other, "<answer>1</answer>")


def test_an_unknown_data_set_is_refused_with_the_nearest_ones():
    with pytest.raises(ValueError, match=r"'reasoning_gym:chain_sums' is none of .* chain_sum"):
        make("chain_sums")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"terms": 3}, r"config\.terms: 'chain_sum' has no such setting; it takes allow_negation"),
        ({"seed": 3}, r"config\.seed: 'chain_sum' has no such setting"),
        ({"min_terms": 0}, r"config: 'chain_sum' refuses .*min_terms must be positive"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        make("chain_sum", config=config)


def test_the_judge_has_none_of_the_workers_keys(monkeypatch):
    monkeypatch.setenv("VCPO_WORKER_KEY", "secret")
    sums = make("chain_sum", config=SMALL)
    sums.reward(sums.prompt(Split.TRAIN, 0), "<answer>1</answer>")
    environment = Path(f"/proc/{sums._judge.process.pid}/environ").read_bytes()
    assert b"VCPO_" not in environment
