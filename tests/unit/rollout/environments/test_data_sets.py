import json
from pathlib import Path

import pytest
from datasets import Dataset

from tests.unit.rollout.environments.data_files import GSM8K
from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.data_sets import DataSet, Questions, load_questions

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
    one, same, other = (load(GSM8K, seed=seed) for seed in (3, 3, 4))
    assert texts(one, Split.TRAIN, 12) == texts(same, Split.TRAIN, 12)
    assert texts(one, Split.TRAIN, 12) != texts(other, Split.TRAIN, 12)
    assert set(texts(one, Split.TRAIN, 12)) == set(texts(other, Split.TRAIN, 12))


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
    assert set(texts(questions, Split.EVALUATION, 3)) == {
        "what is 20?",
        "what is 21?",
        "what is 22?",
    }
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
        (
            '{"question": "1?", "answer": "1"}\n{"question": "2?"}\n',
            r"row 2 has no text in column ",
        ),
        ('{"answer": "1"}\n', r"row 1 has no text in column 'question' \(its columns are 'answer'"),
        ('{"question": 1, "answer": "1"}\n', "row 1 has no text in column 'question'"),
        ('{"question": "1?", "answer": ""}\n', "row 1 has no answer .* column 'answer'"),
        ('{"question": "1?", "answer": "1"}\n{oops\n', "line 2 is not JSON"),
        ("[1]\n", "line 1 is not a JSON object"),
    ],
)
def test_what_a_row_lacks_is_named_by_file_and_row(tmp_path, content, said):
    file = tmp_path / "questions.jsonl"
    file.write_text(content)
    with pytest.raises(
        ValueError, match=f"^environment.parameters.path: .*questions.jsonl.*{said}"
    ):
        load(file)


def test_a_file_that_is_not_there_is_named_with_the_cure(tmp_path):
    with pytest.raises(ValueError, match=r"parameters.path: '.*none.jsonl' does not exist"):
        load(tmp_path / "none.jsonl")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "questions.csv").touch()
    with pytest.raises(ValueError, match=r"questions.csv' is neither .jsonl nor .parquet"):
        load(tmp_path / "questions.csv")


def test_a_folder_without_data_is_refused_with_the_cause(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be loaded .*give the path of a local copy"):
        load(tmp_path)


def test_a_split_without_items_is_named_when_it_is_asked_for():
    questions = Questions({Split.TRAIN: (), Split.EVALUATION: ()}, seed=0)
    with pytest.raises(ValueError, match="no item for evaluation; give more rows"):
        questions.at(Split.EVALUATION, 0)
