import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.sort_digits import SortDigits


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("12459", 1.0),
        (" 12459\n", 1.0),
        ("thinking... <answer>12459</answer>", 1.0),
        (r"\boxed{12459}", 1.0),
        pytest.param("52914", 0.0, id="not sorted"),
        pytest.param("1245", 0.0, id="digit missing"),
        pytest.param("124599", 0.0, id="digit added"),
        pytest.param("12459 is sorted", 0.0, id="more than the answer"),
        pytest.param("12459 <answer>52914</answer>", 0.0, id="tag wins"),
        pytest.param("", 0.0, id="empty"),
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


def test_instruct_style_shows_the_digits_and_the_tags():
    prompt = SortDigits(seed=0).prompt(Split.TRAIN, 0)
    plain = SortDigits(seed=0, style="plain").prompt(Split.TRAIN, 0)
    assert plain.text.removeprefix("sort ").removesuffix("=") in prompt.text
    assert "<answer>" in prompt.text


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
