import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo_rollout.environments.answers import extract_answer, extract_boxed


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


@given(st.text(alphabet=r"ab+{}\<>/ ") | st.text())
def test_tagged_answer_is_found_behind_any_text_without_a_box(text):
    if "boxed" not in text:
        assert extract_answer(f"{text}<answer>42</answer>") == "42"


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
