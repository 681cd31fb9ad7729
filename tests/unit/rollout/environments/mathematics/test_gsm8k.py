import pytest

from tests.unit.rollout.environments.data_files import GSM8K
from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.mathematics.tasks import Gsm8k


@pytest.fixture(scope="module")
def gsm8k():
    return Gsm8k(seed=0, path=GSM8K)


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("42", "14 days of 3 boats.\n#### 42", 1.0),
        ("42", "#### 42.", 1.0),
        ("42", "#### 42.0", 1.0),
        ("1250", "#### $1,250", 1.0),
        ("1250", r"It is \boxed{1,250}.", 1.0),
        ("-5", "<answer>-5</answer>", 1.0),
        ("2.25", r"\boxed{9/4}", 1.0),
        pytest.param("42", "#### 41\nNo:\n#### 42", 1.0, id="the last mark counts"),
        pytest.param("42", "#### 42\nNo:\n#### 41", 0.0, id="even when it is wrong"),
        pytest.param("42", "The answer is 42.", 0.0, id="not marked"),
        pytest.param("42", "#### 420", 0.0, id="longer number"),
        pytest.param("42", "#### -42", 0.0, id="sign"),
        pytest.param("42", "#### ,", 0.0, id="no number"),
        pytest.param("42", "", 0.0, id="empty"),
    ],
)
def test_the_reward_is_one_for_exactly_the_marked_number(gsm8k, answer, response, reward):
    assert gsm8k.reward(Prompt(text="how many?", answer=answer), response) == reward


def test_the_answer_is_the_number_at_the_end_of_the_solution(gsm8k):
    answers = {gsm8k.prompt(Split.TRAIN, index).answer for index in range(12)}
    assert answers >= {"42", "-5", "2.25"}


def test_the_prompt_shows_question_and_mark_and_never_the_solution(gsm8k):
    text = gsm8k.prompt(Split.TRAIN, 0).text
    assert text.endswith("give the number alone on the last line, after ####.")
    assert "<<" not in text
    plain = Gsm8k(seed=0, path=GSM8K, style="plain").prompt(Split.TRAIN, 0).text
    assert text.startswith(f"{plain}\n\n")


def test_a_path_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match=r"environment.parameters.path: 3 is not a path"):
        Gsm8k(seed=0, path=3)
