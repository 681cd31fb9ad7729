from fractions import Fraction

import pytest

from vcpo_rollout.environments.answers import extract_answer, extract_boxed
from vcpo_rollout.environments.arithmetic import MAX_CHARACTERS, calculate


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        pytest.param("", None, id="empty"),
        pytest.param("24", None, id="unmarked"),
        pytest.param("<answer>3+5</answer>", "3+5", id="tagged"),
        pytest.param("<answer> 3+5 </answer>", "3+5", id="surrounding spaces"),
        pytest.param("<answer>1</answer> no, <answer>2</answer>", "2", id="last tag"),
        pytest.param("<answer>1<answer>2</answer>", "2", id="tag opened twice"),
        pytest.param("<answer>3+\n5</answer>", None, id="tag over two lines"),
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
        (r"\boxed", None),
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
    ],
)
def test_arithmetic_has_its_usual_value(expression, value, numbers):
    calculation = calculate(expression)
    assert calculation is not None
    assert (calculation.value, calculation.numbers) == (value, numbers)


@pytest.mark.parametrize(
    "expression",
    [
        pytest.param("", id="empty"),
        pytest.param("9**9**9", id="powers"),
        pytest.param("__import__('os')", id="import"),
        pytest.param("3+5=8", id="equation"),
        pytest.param("1/0", id="division by zero"),
        pytest.param("1e309", id="exponent"),
        pytest.param("3.0+5", id="decimal"),
        pytest.param("3 5", id="two numbers"),
        pytest.param("03+5", id="leading zero"),
        pytest.param("3\n+5", id="line break"),
        pytest.param("\u0663+\u0665", id="Arabic digits"),
        pytest.param("\uff13+\uff15", id="full-width digits"),
        pytest.param("3\u00d75", id="multiplication sign"),
        pytest.param("True+1", id="boolean"),
        pytest.param("(" * 100 + "1", id="open parentheses"),
        pytest.param("-" * 100 + "1", id="many signs"),
        pytest.param("1" + "+1" * 100, id="too many operations"),
        pytest.param("9" * (MAX_CHARACTERS + 1), id="too long"),
    ],
)
def test_anything_else_has_no_value(expression):
    assert calculate(expression) is None


def test_longest_number_is_exact():
    calculation = calculate("9" * MAX_CHARACTERS)
    assert calculation is not None
    assert calculation.value == 10**MAX_CHARACTERS - 1
