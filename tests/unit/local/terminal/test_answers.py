"""Answers before and after a run, as the terminal shows them."""

from __future__ import annotations

from tests.fixtures.records import evaluation_record
from vcpo.local.terminal.summary import answer_lines
from vcpo.records.journal import Journal, Metrics, ShownAnswer, read_metrics

FIRST = ShownAnswer(prompt="<s>\nWhat is 2 + 2?", response="five\x1b[2J", reward=0.0)
LAST = ShownAnswer(prompt="<s>\nWhat is 2 + 2?", response="4</s>", reward=1.0)


def metrics(*evaluations) -> Metrics:
    return Metrics(steps=(), evaluations=evaluations)


def test_each_prompt_has_its_first_and_its_last_answer_and_a_terminal_obeys_none_of_them():
    shown = metrics(
        evaluation_record(step=0, answers=(FIRST,)),
        evaluation_record(step=2, answers=()),
        evaluation_record(step=4, answers=(LAST,)),
    )
    assert list(answer_lines(shown)) == [
        "...<s> What is 2 + 2?",
        "    before  five [2J  (reward 0)",
        "    after   4</s>  (reward 1)",
    ]


def test_a_run_of_one_evaluation_shows_none():
    assert list(answer_lines(metrics(evaluation_record(answers=(FIRST,))))) == []


def test_the_journal_returns_answers_as_they_were_written(tmp_path):
    record = evaluation_record(answers=(FIRST, LAST))
    Journal(tmp_path).evaluation(record)
    assert read_metrics(tmp_path).evaluations == (record,)
