import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.plugins.calculator.calculator import Calculator
from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.environment import MultiTurnEnvironment

PLAIN = Calculator(seed=0, style="plain", calls=1)
PROMPT = Prompt(text="a=12 b=7 a*b-a: ", answer="72", metadata={"expression": "12*7-12"})


def test_it_speaks_with_the_model():
    assert isinstance(PLAIN, MultiTurnEnvironment)


@settings(max_examples=50)
@given(index=st.integers(0, 10**6), letters=st.integers(2, 8))
def test_the_answer_is_the_value_of_the_formula_with_its_numbers(index, letters):
    task = Calculator(seed=0, style="plain", letters=letters)
    prompt = task.prompt(Split.TRAIN, index)
    numbers = {letter: int(number) for letter, number in re.findall(r"(\w)=(\d+)", prompt.text)}
    formula = re.fullmatch(r"(?:\w=\d+ )+(.+): ", prompt.text).group(1)
    assert len(numbers) == letters
    assert 4 <= len(re.findall("[a-h]", formula)) <= 6
    assert prompt.answer == str(eval(formula, numbers))


def test_no_question_is_in_both_splits():
    def questions(split, seed):
        task = Calculator(seed=seed, letters=2, terms=2, values=(1, 9), style="plain")
        return {task.prompt(split, index).text for index in range(500)}

    assert not questions(Split.TRAIN, 0) & questions(Split.EVALUATION, 1)


def test_the_last_line_is_calculated_and_the_answer_after_it_counts():
    exchange = PLAIN.converse(PROMPT)
    assert exchange.next_turn("a is 12 and b is 7\n12*7-12 \n") == "=72\n"
    assert exchange.next_turn("<answer>72</answer>") is None
    assert exchange.reward() == 1.0


def test_a_value_that_is_not_a_whole_number_is_exact():
    assert PLAIN.converse(PROMPT).next_turn("7/3-1") == "=4/3\n"


@pytest.mark.parametrize(
    "turn",
    ["", "\n", "a*b-a", "12*7-12\nplease", "012*7", "2**9", "1/0", "__import__('os')"],
    ids=["empty", "blank", "letters", "words", "zero first", "power", "by zero", "program"],
)
def test_what_is_no_calculation_has_no_value(turn):
    exchange = PLAIN.converse(PROMPT)
    assert exchange.next_turn(turn) == "=?\n"
    assert exchange.reward() == 0.0


def test_a_right_answer_in_the_first_turn_needs_no_calculator():
    exchange = PLAIN.converse(PROMPT)
    assert exchange.next_turn("<answer>72</answer>") is None
    assert exchange.reward() == 1.0


def test_calculations_are_counted_and_a_further_one_ends_the_conversation():
    exchange = PLAIN.converse(PROMPT)
    assert exchange.next_turn("12*7") == "=84\n"
    assert exchange.next_turn("84-12") is None
    assert exchange.reward() == 0.0


@given(st.lists(st.text(), max_size=3))
def test_any_turns_have_a_reward(turns):
    exchange = PLAIN.converse(PROMPT)
    for turn in turns:
        exchange.next_turn(turn)
    assert exchange.reward() in (0.0, 1.0)


def test_instruct_style_says_how_to_call_and_how_to_answer():
    text = Calculator(seed=0, calls=2).prompt(Split.TRAIN, 0).text
    assert "up to 2 times" in text
    assert "<answer>" in text
    assert re.match(r"a = \d+, b = \d+, c = \d+\. What is [abc*+-]+\? ", text)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"letters": 9}, "environment.parameters.letters: 9 is not an integer from 2 to 8"),
        ({"terms": [6, 4]}, r"environment.parameters.terms: \[6, 4\] is empty"),
        ({"values": 0}, "environment.parameters.values: 0 is not an integer from 1 to 1000000"),
        ({"calls": 0}, "environment.parameters.calls: 0 is not an integer from 1 to 64"),
        ({"style": "long"}, "environment.parameters.style: 'long' is unknown"),
    ],
)
def test_a_bad_parameter_is_named(parameters, said):
    with pytest.raises(ValueError, match=said):
        Calculator(seed=0, **parameters)
