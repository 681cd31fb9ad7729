import inspect
import json
import sys
from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.run_tests import passed
from tests.unit.rollout.environments.data_files import GSM8K, MATH
from vcpo_rollout.environments import Prompt, Split, make_environment
from vcpo_rollout.environments.countdown import Countdown
from vcpo_rollout.environments.draws import draw_item, split_of
from vcpo_rollout.environments.environment import BUILT_IN
from vcpo_rollout.environments.own_data_set import OwnDataSet
from vcpo_rollout.environments.sort_digits import SortDigits

PROMPT = Prompt(text="double", metadata={"tests": ["assert f(2) == 4", "assert f(-1) == -2"]})


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def f(x): return 2 * x", 1.0),
        ("def f(x): return 4", 0.5),
        ("def f(x): exit(0)", 0.0),
        ("print('passed'); exit()", 0.0),
        ("def f(x): return [0] * 10**10", 0.0),
        ("open('a', 'wb').write(b'x' * 2**21)\ndef f(x): return 2 * x", 0.0),
        ("def f(", 0.0),
    ],
)
def test_the_reward_is_the_share_of_tests_passed(program, reward):
    assert passed(PROMPT, f"See:\n```python\n{program}\n```", seconds=60) == reward


def test_a_program_that_never_ends_fails_when_its_time_is_over():
    assert passed(PROMPT, "```python\nwhile True: pass\n```", seconds=1) == 0.0


def draw(split, index, *, seed=0, propose=lambda random: random.randrange(10**9), **limits):
    return draw_item(seed=seed, split=split, index=index, propose=propose, key=str, **limits)


def test_seeds_indices_and_splits_give_different_items():
    items = {
        draw(Split.TRAIN, 0),
        draw(Split.TRAIN, 1),
        draw(Split.TRAIN, 0, seed=1),
        draw(Split.EVALUATION, 0),
    }
    assert len(items) == 4


@pytest.mark.parametrize("split", list(Split))
def test_drawn_items_belong_to_the_split_whatever_the_seed(split):
    items = [draw(split, index, seed=seed) for index in range(50) for seed in range(3)]
    assert {split_of(str(item)) for item in items} == {split}


def test_about_a_tenth_of_all_items_is_kept_for_evaluation():
    # 10,000 fair draws at 0.1 stay within five standard deviations (0.003 each) of it.
    kept = sum(split_of(str(item)) is Split.EVALUATION for item in range(10_000))
    assert 850 <= kept <= 1150


def test_a_draw_without_any_item_gives_up_and_says_so():
    with pytest.raises(ValueError, match="no train item was found in 10 attempts; widen"):
        draw(Split.TRAIN, 0, propose=lambda _: None, max_proposals=10)


def test_negative_index_is_refused():
    with pytest.raises(ValueError, match="index: -1 is negative"):
        draw(Split.TRAIN, -1)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("12459", 1.0),
        ("thinking... <answer>12459</answer>", 1.0),
        (r"\boxed{12459}", 1.0),
        pytest.param("52914", 0.0, id="not sorted"),
        pytest.param("1245", 0.0, id="digit missing"),
        pytest.param("124599", 0.0, id="digit added"),
        pytest.param("12459 is sorted", 0.0, id="more than the answer"),
        pytest.param("12459 <answer>52914</answer>", 0.0, id="tag wins"),
        pytest.param("\u0661\u0662\u0664\u0665\u0669", 0.0, id="Arabic digits"),
    ],
)
def test_reward_is_one_for_exactly_the_sorted_digits(response, reward):
    prompt = Prompt(text="sort 52914=", answer="12459")
    assert SortDigits(seed=0).reward(prompt, response) == reward


@settings(max_examples=50)
@given(index=st.integers(0, 10**6), digits=st.integers(3, 64))
def test_answer_is_the_prompted_digits_in_order(index, digits):
    prompt = SortDigits(seed=0, digits=digits, style="plain").prompt(Split.TRAIN, index)
    shown = prompt.text.removeprefix("sort ").removesuffix("=")
    assert len(shown) == digits
    assert [shown.count(digit) for digit in "0123456789"] == [
        prompt.answer.count(digit) for digit in "0123456789"
    ]
    assert all(left <= right for left, right in zip(prompt.answer, prompt.answer[1:], strict=False))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"digits": 2}, "environment.parameters.digits: 2 is not an integer from 3 to 64"),
        ({"digits": "5"}, "environment.parameters.digits: '5' is not an integer"),
        ({"style": None}, "environment.parameters.style: None is unknown"),
    ],
)
def test_bad_parameter_is_named_when_the_task_is_made(parameters, message):
    with pytest.raises(ValueError, match=message):
        SortDigits(seed=0, **parameters)


class Echo:
    """A user's own environment: the response must be the word, given as many times as asked."""

    def __init__(self, *, seed, word, times=1):
        self.seed, self.word, self.times = seed, word, times

    def prompt(self, split, index):
        return Prompt(text=f"{split}/{index}", answer=self.word * self.times)

    def reward(self, prompt, response):
        return float(prompt.answer == response)


ECHO = f"{__name__}:Echo"


NEEDED = {
    "data_set": {"path": GSM8K, "prompt": "question"},
    "gsm8k": {"path": GSM8K},
    "math": {"path": MATH},
}
"""Parameters without which a task does not work on a machine without network."""


def test_named_task_is_made_with_its_parameters_and_the_seed():
    made = make_environment("countdown", {"numbers": [2, 3], "style": "plain"}, 7)
    assert made == Countdown(seed=7, numbers=(2, 3), style="plain")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_task_works_with_its_defaults(name):
    parameters = NEEDED.get(name, {})
    environment = make_environment(name, parameters, 0)
    prompt = environment.prompt(Split.EVALUATION, 0)
    assert prompt == make_environment(name, parameters, 0).prompt(Split.EVALUATION, 0)
    assert environment.reward(prompt, "no idea") == 0.0


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_two_seeds_make_two_series_of_prompts(name):
    series = [
        [
            make_environment(name, NEEDED.get(name, {}), seed).prompt(Split.TRAIN, index)
            for index in range(20)
        ]
        for seed in (0, 1)
    ]
    assert series[0] != series[1]


def test_users_class_is_found_by_module_and_name():
    environment = make_environment(ECHO, {"word": "ho", "times": 3}, 0)
    assert environment.reward(environment.prompt(Split.TRAIN, 0), "hohoho") == 1.0


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        (
            "chess",
            {},
            "'chess' is unknown; use one of countdown, data_set, gsm8k, math, sort_digits",
        ),
        ("no_such_package:Task", {}, "environment.name: .*cannot be imported.*install"),
        ("json:NoSuchTask", {}, "environment.name: .*cannot be imported"),
        (".sibling:Task", {}, "environment.name: '.sibling:Task' is unknown"),
        ("subprocess:Popen", {"args": ["true"]}, "environment.name: .* is not an environment"),
        ("countdown", {"digits": 5}, "'digits'.*known parameters are numbers, operators, style"),
        ("countdown", {"seed": 5}, "environment.parameters.seed: 5 .*set the run's seed"),
        (ECHO, {}, "'word'.*the known parameters are times, word"),
    ],
)
def test_what_leads_to_no_environment_is_refused_by_name(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        make_environment(name, parameters, 0)


def test_without_verifiers_its_task_sets_are_refused_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ValueError, match=r"needs the package verifiers.*'vcpo\[verifiers\]'"):
        make_environment("verifiers:words", {}, 0)


def test_the_listed_parameters_are_those_of_the_class():
    for name, listed in BUILT_IN.items():
        module_name, _, class_name = listed.implementation.partition(":")
        signature = inspect.signature(getattr(import_module(module_name), class_name))
        assert (name, listed.parameters | {"seed"}) == (name, set(signature.parameters))


ROWS = [{"ask": f"{n} + {n}?", "sum": 2 * n, "level": n % 3} for n in range(40)]
COLUMNS = {"prompt": "ask", "answer": "sum"}


@pytest.fixture
def rows(tmp_path):
    """Write rows to a file; return its path."""

    def write(rows=ROWS):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(path)

    return write


def prompts(task, split, count=40):
    return {task.prompt(split, index).text: task.prompt(split, index) for index in range(count)}


def test_a_row_is_a_prompt_with_its_answer_and_the_whole_row_for_the_judge(rows):
    task = OwnDataSet(seed=1, path=rows(), **COLUMNS)
    found = prompts(task, Split.TRAIN) | prompts(task, Split.EVALUATION)
    assert found["7 + 7?"] == Prompt(text="7 + 7?", answer="14", metadata=ROWS[7])
    assert len(found) == 40


def test_its_own_reward_is_for_the_marked_answer_or_the_whole_text(rows):
    task = OwnDataSet(seed=1, path=rows(), **COLUMNS)
    told = ["14", " 14\n", "It is <answer>14</answer>.", "It is 14", "<answer>7</answer>14"]
    prompt = Prompt(answer="14")
    assert [task.reward(prompt, each) for each in told] == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_the_first_rows_stand_solved_before_each_question_and_are_not_asked(rows):
    task = OwnDataSet(seed=1, path=rows(), instruction="Be short.", examples=2, **COLUMNS)
    plain = OwnDataSet(seed=1, path=rows(), instruction="Be short.", **COLUMNS)
    trained = {prompt.answer for prompt in prompts(plain, Split.TRAIN).values()}
    first, second = (row for row in ROWS if str(row["sum"]) in sorted(trained, key=int)[:2])
    shown = [
        {"role": "user", "content": f"{first['ask']}\n\nBe short."},
        {"role": "assistant", "content": str(first["sum"])},
        {"role": "user", "content": f"{second['ask']}\n\nBe short."},
        {"role": "assistant", "content": str(second["sum"])},
    ]
    asked = [task.prompt(Split.TRAIN, index) for index in range(2 * len(trained))]
    assert all(list(each.messages[:4]) == shown for each in asked)
    assert {each.answer for each in asked} == trained - {str(first["sum"]), str(second["sum"])}
    assert all(len(each.messages) == 5 for each in asked)


def test_a_question_of_messages_keeps_its_system_message_first(rows):
    system = {"role": "system", "content": "Count."}
    asked = [
        {"ask": [system, {"role": "user", "content": row["ask"]}], "sum": row["sum"]}
        for row in ROWS
    ]
    task = OwnDataSet(seed=1, path=rows(asked), examples=1, instruction="Now.", **COLUMNS)
    messages = task.prompt(Split.TRAIN, 0).messages
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    assert messages[0] == system
    assert messages[3]["content"].endswith("?\n\nNow.")


def test_without_an_answer_column_rows_need_none(rows):
    task = OwnDataSet(seed=1, path=rows(), prompt="ask", answer=None)
    assert task.prompt(Split.TRAIN, 0).answer == ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"prompt": "question"},
            (
                r"path: .*row 1 has no text, number or messages in column 'question' \(its columns"
                r" are 'ask', 'sum', 'level'\); .*\(parameters `prompt` and `answer`\)"
            ),
        ),
        ({"path": "none.jsonl"}, r"path: 'none.jsonl' does not exist"),
        ({"path": None}, r"path: None and `hub` None: give one of them"),
        ({"hub": "openai/gsm8k"}, r"path: '.*' and `hub` 'openai/gsm8k': give one of them"),
        ({"examples": 65}, r"examples: 65 is not an integer from 0 to 64"),
        ({"examples": 1, "answer": None}, r"examples: 1 needs solved rows; name the column"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_cure(rows, settings, said):
    with pytest.raises(ValueError, match=rf"^environment\.parameters\.{said}"):
        OwnDataSet(**{"seed": 1, "path": rows(), **COLUMNS, **settings})


def test_messages_without_a_role_are_named_by_row(rows):
    path = rows([{"ask": [{"content": "?"}], "sum": 1}])
    with pytest.raises(ValueError, match=r"row 1: messages\[0\]: must have a role"):
        OwnDataSet(seed=1, path=path, **COLUMNS)
