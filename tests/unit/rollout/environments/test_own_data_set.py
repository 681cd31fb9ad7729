import json

import pytest

from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.own_data_set import OwnDataSet

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
