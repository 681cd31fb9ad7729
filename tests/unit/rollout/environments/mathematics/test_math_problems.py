import pytest

from tests.unit.rollout.environments.data_files import MATH
from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.mathematics.tasks import MathProblems


@pytest.fixture(scope="module")
def problems():
    return MathProblems(seed=0, path=MATH)


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        (r"\frac{1}{2}", r"so \boxed{\frac{1}{2}}", 1.0),
        (r"\frac{1}{2}", r"so \boxed{0.5}.", 1.0),
        (r"\frac{1}{2}", r"so \boxed{\frac{2}{4}}", 1.0),
        (r"2\sqrt{7}", r"\boxed{\sqrt{28}}", 1.0),
        ("(x-1)(x+1)", r"\boxed{x^2 - 1}", 1.0),
        pytest.param("7", r"\boxed{6} or rather \boxed{7}", 1.0, id="the last box counts"),
        pytest.param("7", r"\boxed{7} or rather \boxed{6}", 0.0, id="even when it is wrong"),
        pytest.param(r"\frac{1}{2}", r"\frac{1}{2}", 0.0, id="no box"),
        pytest.param(r"\frac{1}{2}", r"\boxed{\frac{1}{2}", 0.0, id="open box"),
        pytest.param("7", r"\boxed{}", 0.0, id="empty box"),
        pytest.param("7", r"\boxed{\frac{}{\sqrt}}", 0.0, id="no mathematics"),
    ],
)
def test_the_reward_is_one_for_a_box_of_the_same_meaning(problems, answer, response, reward):
    assert problems.reward(Prompt(text="how much?", answer=answer), response) == reward


def test_the_answer_is_what_the_solution_boxes(problems):
    answers = {problems.prompt(Split.TRAIN, index).answer for index in range(11)}
    assert answers == {
        r"\frac{1}{2}",
        "7",
        "a^2+2ab+b^2",
        r"9\pi",
        "32",
        "2",
        "-1",
        "(x-1)(x+1)",
        "6",
        r"\frac13",
        "120",
    }


def test_the_prompt_asks_for_a_box(problems):
    assert problems.prompt(Split.TRAIN, 0).text.endswith(r"then give the answer in \boxed{}.")
