"""Answers before and after a run, as the terminal shows them."""

from __future__ import annotations

from tests.fixtures.samples import make_sample
from vcpo.local.terminal.summary import answer_lines
from vcpo.records.samples import write_answers

FIRST = make_sample(prompt="<s>\nWhat is 2 + 2?", response="five\x1b[2J", reward=0.0)
LAST = make_sample(prompt="<s>\nWhat is 2 + 2?", response="4</s>", reward=1.0)


def test_each_prompt_has_its_first_and_its_last_answer_and_a_terminal_obeys_none_of_them(tmp_path):
    for step, answers in ((0, [FIRST]), (2, []), (4, [make_sample(prompt_index=9), LAST])):
        write_answers(tmp_path, step, answers)
    assert list(answer_lines(tmp_path)) == [
        "...<s> What is 2 + 2?",
        "    before  five [2J  (reward 0)",
        "    after   4</s>  (reward 1)",
    ]


def test_a_run_of_one_evaluation_shows_none(tmp_path):
    write_answers(tmp_path, 0, [FIRST])
    assert list(answer_lines(tmp_path)) == []
