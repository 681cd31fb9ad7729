import inspect
import json
import sys
from fractions import Fraction
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.run_tests import passed
from tests.unit.rollout.environments.data_files import GSM8K, MATH
from vcpo_rollout.environments import Prompt, Split, make_environment
from vcpo_rollout.environments.answers import extract_answer, extract_boxed
from vcpo_rollout.environments.arithmetic import MAX_CHARACTERS, calculate
from vcpo_rollout.environments.countdown import Countdown
from vcpo_rollout.environments.data_sets import DataSet, load_questions
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
    with pytest.raises(ValueError, match="index: -1 is negative"):
        draw(Split.TRAIN, -1)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("12459", 1.0),
        ("thinking... <answer>12459</answer>", 1.0),
        (r"\boxed{12459}", 1.0),
        *((wrong, 0.0) for wrong in ("52914", "1245", "124599", "12459 is sorted")),
        ("12459 <answer>52914</answer>", 0.0),
        ("\u0661\u0662\u0664\u0665\u0669", 0.0),
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
    own = make_environment(ECHO, {"word": "ho", "times": 3}, 0)
    assert own.reward(own.prompt(Split.TRAIN, 0), "hohoho") == 1.0


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_task_works_with_its_defaults(name):
    parameters = NEEDED.get(name, {})
    environment = make_environment(name, parameters, 0)
    prompt = environment.prompt(Split.EVALUATION, 0)
    assert prompt == make_environment(name, parameters, 0).prompt(Split.EVALUATION, 0)
    assert environment.reward(prompt, "no idea") == 0.0


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
    right = ["14", " 14\n", "It is <answer>14</answer>.", "<think>2 * 7</think>\n\n14", "**14**"]
    wrong = ["It is 14", "<answer>7</answer>14", "14</think>"]
    prompt = Prompt(answer="14")
    assert [task.reward(prompt, each) for each in right + wrong] == [1.0] * 5 + [0.0] * 3


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
        ({"prompt": "b"}, r"path: .*row 1 has no text or number .*columns are 'ask', 'sum', 'lev"),
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


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        pytest.param("", None, id="empty"),
        pytest.param("24", None, id="unmarked"),
        pytest.param("<answer>3+5</answer>", "3+5", id="tagged"),
        pytest.param("<answer> 3+5 </answer>", "3+5", id="surrounding spaces"),
        pytest.param("<answer>1</answer> no, <answer>2</answer>", "2", id="last tag"),
        pytest.param("<answer>1<answer>2</answer>", "2", id="tag opened twice"),
        pytest.param("<answer>\nx<3\ny\n</answer>", "x<3\ny", id="tag over lines with <"),
        pytest.param("<answer>1</answer></answer> or <answer>2", "1", id="tag closed twice"),
        pytest.param("<answer>**42**</answer>", "42", id="bold"),
        pytest.param("<answer>**a** or **b**</answer>", "**a** or **b**", id="bold words"),
        pytest.param(r"\boxed{1}</think><answer>2</answer></think> 3", None, id="thought only"),
        pytest.param(r"<think>\boxed{1}</think><answer>2</answer>", "2", id="after a thought"),
        pytest.param(r"\boxed{\text{Friday}}", r"\text{Friday}", id="braces in a box"),
        pytest.param("<answer>3+5", None, id="tag left open"),
        pytest.param(r"\boxed{3+5}", "3+5", id="boxed"),
        pytest.param(r"\boxed{1} or \boxed{2}", "2", id="last box"),
        pytest.param(r"\boxed{1} <answer>2</answer>", "1", id="box before tag"),
        pytest.param(r"<answer></answer>", "", id="empty tag"),
    ],
)
def test_answer_is_the_last_box_or_else_the_last_tag(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{ {2} }", "{2}"),
        (r"$\fbox{2}$", "2"),
        (r"$\boxed -1$", "-1"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        (r"\boxed{7} or \boxed{6", "7"),
        (r"\boxed{\left\{ x \right.} + {1", r"\left\{ x \right."),
        (r"} \boxed {x^{2}+1}}", "x^{2}+1"),
        (r"\boxed{7}, with \boxed in LaTeX", "7"),
        ("5", None),
        ("", None),
    ],
)
def test_a_box_ends_where_its_braces_are_balanced(text, found):
    assert extract_boxed(text) == found


def test_a_response_of_nothing_but_open_boxes_is_searched_once():
    # A search of each box to the end of the response takes a day.
    assert extract_answer("\\boxed{" * 1_000_000) is None
    assert extract_answer("\\boxed{7}" + "\\boxed{" * 1_000_000) == "7"


@pytest.mark.parametrize(
    ("expression", "value", "numbers"),
    [
        ("3*5+9", 24, (3, 5, 9)),
        ("3*(5+9)", 42, (3, 5, 9)),
        ("9-3-5", 1, (9, 3, 5)),
        ("9-(3-5)", 11, (9, 3, 5)),
        ("1/3", Fraction(1, 3), (1, 3)),
        ("1/3*3", 1, (1, 3, 3)),
        ("-3+8", 5, (3, 8)),
        ("3--5", 8, (3, 5)),
        ("((((8))))", 8, (8,)),
        ("9" * MAX_CHARACTERS, 10**MAX_CHARACTERS - 1, (10**MAX_CHARACTERS - 1,)),
    ],
)
def test_arithmetic_has_its_usual_value(expression, value, numbers):
    calculation = calculate(expression)
    assert calculation is not None
    assert (calculation.value, calculation.numbers) == (value, numbers)


NO_NUMBERS = (  # noqa: SIM905 - the last have digits and a sign of other scripts
    "9**9**9 __import__('os') 3+5=8 1/0 1e309 3.0+5 03+5 True+1 3\u00d75 \u0663+5 \uff13+5"
).split()
DEEP = ("(" * 100 + "1", "-" * 100 + "1", "1" + "+1" * 100, "9" * (MAX_CHARACTERS + 1))


@pytest.mark.parametrize("expression", ["", "3 5", "3\n+5", *NO_NUMBERS, *DEEP])
def test_anything_else_has_no_value(expression):
    assert calculate(expression) is None


SET = DataSet(hub_name="nobody/nothing", hub_config="main", columns=("question", "answer"))


def make_prompt(row):
    return Prompt(text=row["question"], answer=row["answer"]) if row["answer"] else None


def load(path, *, seed=0):
    return load_questions(SET, str(path), make_prompt, seed=seed)


def texts(questions, split, count):
    return [questions.at(split, index).text for index in range(count)]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(number):
    return {"question": f"what is {number}?", "answer": str(number)}


def rows_of_gsm8k():
    return [json.loads(line) for line in Path(GSM8K).read_text().splitlines()]


def test_every_question_is_met_once_before_any_is_met_twice():
    questions = load(GSM8K)
    # 12 of the 14 questions are for training by their hash.
    rounds = [texts(questions, Split.TRAIN, 36)[at : at + 12] for at in (0, 12, 24)]
    assert {len(set(each)) for each in rounds} == {12}
    assert set(rounds[0]) == set(rounds[1]) == set(rounds[2])
    assert rounds[0] != rounds[1]


def test_the_splits_share_no_question_and_leave_none_out():
    questions = load(GSM8K)
    train, evaluation = (set(texts(questions, split, 30)) for split in Split)
    assert not train & evaluation
    assert train | evaluation == {row["question"] for row in rows_of_gsm8k()}


def test_the_seed_chooses_the_order_and_nothing_else():
    one, same, other = (texts(load(GSM8K, seed=seed), Split.TRAIN, 12) for seed in (3, 3, 4))
    assert one == same != other
    assert set(one) == set(other)


def test_of_a_few_questions_one_is_held_out_whatever_the_seed(tmp_path):
    file = write_rows(tmp_path / "few.jsonl", [row(number) for number in range(3)])
    held_out = {seed: texts(load(file, seed=seed), Split.EVALUATION, 6) for seed in (1, 2)}
    assert set(held_out[1]) == set(held_out[2])
    assert len(set(held_out[1])) == 1
    assert len(set(texts(load(file), Split.TRAIN, 6)) - set(held_out[1])) == 2


def test_files_of_a_folder_keep_their_splits(tmp_path):
    write_rows(tmp_path / "train.jsonl", map(row, range(9)))
    write_rows(tmp_path / "test.jsonl", map(row, range(20, 23)))
    questions = load(tmp_path)
    assert set(texts(questions, Split.EVALUATION, 3)) == {f"what is {n}?" for n in (20, 21, 22)}
    assert set(texts(questions, Split.TRAIN, 9)) == {f"what is {number}?" for number in range(9)}


def test_a_question_of_both_files_is_not_trained_on(tmp_path):
    write_rows(tmp_path / "train.jsonl", map(row, range(3)))
    write_rows(tmp_path / "test.jsonl", map(row, range(2, 4)))
    assert set(texts(load(tmp_path), Split.TRAIN, 6)) == {"what is 0?", "what is 1?"}


def test_a_parquet_file_holds_the_same_as_its_lines(tmp_path):
    Dataset.from_list(rows_of_gsm8k()).to_parquet(tmp_path / "questions.parquet")
    parquet, lines = load(tmp_path / "questions.parquet"), load(GSM8K)
    assert texts(parquet, Split.TRAIN, 12) == texts(lines, Split.TRAIN, 12)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"question": "1?", "answer": "1"}\n{"question": "2?"}', "row 2 has no text in column "),
        ('{"answer": "1"}', r"row 1 has no text in column 'question' \(it is None; the columns"),
        ('{"question": 1, "answer": "1"}', "row 1 has no text in column 'question'"),
        ('{"question": "1?", "answer": ""}', "row 1 has no answer .* column 'answer'"),
        ('{"question": "1?", "answer": "1"}\n{oops', "line 2 is not a JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"question": "1?", "answer": "1"}\n\n{"question": "caf\xe9?"}', "line 3 is not in UTF-8"),
        ("\xff\xfe{\0", "line 1 is not in UTF-8"),
        ("[" * 100_000, "line 1 is not a JSON"),
        (r'{"question": "\ud800?", "answer": "1"}', "row 1: .*surrogates not allowed"),
    ],
)
def test_what_a_row_lacks_is_named_by_file_and_row(tmp_path, content, said):
    file = tmp_path / "questions.jsonl"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(
        ValueError, match=f"^environment.parameters.path: .*questions.jsonl.*{said}"
    ):
        load(file)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "questions.csv").touch()
    with pytest.raises(ValueError, match=r"questions.csv' is neither .jsonl nor .parquet"):
        load(tmp_path / "questions.csv")


def test_a_folder_without_data_is_refused_with_the_cause(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be loaded .*give whole files in UTF-8"):
        load(tmp_path)


def test_a_cut_parquet_file_is_named_and_not_what_reads_it(tmp_path):
    file = tmp_path / "rows.parquet"
    Dataset.from_list(rows_of_gsm8k()).to_parquet(file)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"rows.parquet' cannot be loaded .*give whole files"):
        load(file)


@pytest.mark.parametrize(
    ("numbers", "split"), [([1] * 10, "evaluation"), ([], "train")], ids=["ten alike", "none"]
)
def test_a_split_without_items_is_named_when_the_data_set_is_read(tmp_path, numbers, split):
    file = write_rows(tmp_path / "few.jsonl", map(row, numbers))
    with pytest.raises(ValueError, match=f"no item is left for {split}, .*other questions"):
        load(file)


def test_a_row_with_other_line_ends_and_a_mark_of_its_encoding_is_one_row(rows):
    ends = "\u2028 \u2029 \x85 \x0b \x1c"
    path = rows([{"ask": f"{n}{ends}\r", "sum": n} for n in range(9)])
    text = Path(path).read_text().replace("\\u2028", "\u2028").replace("\\u2029", "\u2029")
    text = text.replace("\\u0085", "\x85").replace("\n", "\r\n")
    Path(path).write_bytes(text.encode("utf-8-sig"))
    task = OwnDataSet(seed=1, path=path, **COLUMNS)
    asked = prompts(task, Split.TRAIN) | prompts(task, Split.EVALUATION)
    assert set(asked) == {f"{n}{ends}\r" for n in range(9)}


@pytest.mark.parametrize(
    ("value", "answer"),
    [(15.0, "15"), (-0.0, "0"), (2.5, "2.5"), (1e300, "1e+300"), (True, "true"), ("15.0", "15.0")],
)
def test_a_number_is_the_answer_that_a_person_would_write(rows, value, answer):
    asked = [{"ask": f"{n}?", "sum": value} for n in range(9)]
    assert OwnDataSet(seed=1, path=rows(asked), **COLUMNS).prompt(Split.TRAIN, 0).answer == answer


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, ["1"], {"a": 1}])
def test_an_answer_that_is_no_number_or_text_is_refused_with_its_row(rows, value):
    with pytest.raises(ValueError, match=r"row 3 has no text or number in column 'sum' \(it is "):
        OwnDataSet(seed=1, path=rows([*ROWS[:2], {"ask": "?", "sum": value}]), **COLUMNS)


def test_rows_of_one_question_stay_together_and_repeated_ones_are_counted(rows, caplog):
    alike = [{**row, "tests": number} for row in ROWS for number in range(3)]
    path = rows([*alike, *alike[:7]])
    task = OwnDataSet(seed=1, path=path, **COLUMNS)
    found = {
        split: {
            (each.text, each.metadata["tests"]) for each in map(partial(task.prompt, split), at)
        }
        for split, at in ((each, range(200)) for each in Split)
    }
    train, evaluation = ({text for text, _ in found[split]} for split in Split)
    assert (len(found[Split.TRAIN] | found[Split.EVALUATION]), train & evaluation) == (120, set())
    assert f"{path!r}: 7 of 127 rows are repeated" in caplog.text


def test_no_question_is_held_out_in_one_form_and_trained_on_in_another(rows):
    user = [{"content": f"{n}", "role": "user"} for n in range(40)]
    forms = [range(40), map(float, range(40)), map(str, range(40)), [[each] for each in user]]
    path = rows([{"ask": ask, "sum": 1} for asked in forms for ask in asked])
    task = OwnDataSet(seed=1, path=path, **COLUMNS)
    assert not prompts(task, Split.TRAIN, 200).keys() & prompts(task, Split.EVALUATION).keys()


def test_a_column_within_another_is_named_with_a_dot(rows):
    of_verl = [
        {
            "prompt": [{"role": "user", "content": row["ask"]}],
            "reward_model": {"style": "rule", "ground_truth": str(row["sum"])},
            "a.b": row["sum"],
        }
        for row in ROWS
    ]
    for answer in ("reward_model.ground_truth", "a.b"):
        task = OwnDataSet(seed=1, path=rows(of_verl), answer=answer)
        assert prompts(task, Split.TRAIN, 200)["9 + 9?"].answer == "18"
    with pytest.raises(ValueError, match=r"in column 'reward_model.truth' \(it is None; "):
        OwnDataSet(seed=1, path=rows(of_verl), answer="reward_model.truth")
