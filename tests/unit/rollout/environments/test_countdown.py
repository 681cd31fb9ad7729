import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.countdown import Countdown

EASY = {"numbers": 3, "values": [1, 9], "targets": [1, 50], "operators": "+-*"}


def puzzle(numbers, target):
    return Prompt(text="", metadata={"numbers": numbers, "target": target})


def reachable(numbers):
    """Every value >= 0 that whole-number steps can reach, by brute force."""
    if len(numbers) == 1:
        return set(numbers)
    values = set()
    for i, j in product(range(len(numbers)), repeat=2):
        if i != j:
            a, b = numbers[i], numbers[j]
            rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
            results = [a + b, a * b, *([a - b] if a >= b else [])]
            results += [a // b] if b and a % b == 0 else []
            values.update(*(reachable([*rest, result]) for result in results))
    return values


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>3*5+9</answer>", 1.0),
        (r"so \boxed{9 + 5 * 3}", 1.0),
        ("<answer>9--(5*3)</answer>", 1.0),
        pytest.param("3*5+9", 0.0, id="unmarked"),
        pytest.param("<answer>3*5+9=24</answer>", 0.0, id="equation"),
        pytest.param("<answer>3*9-5</answer>", 0.0, id="wrong value"),
        pytest.param("<answer>3*5+9*1</answer>", 0.0, id="extra number"),
        pytest.param("<answer>3*(3+5)</answer>", 0.0, id="missing number"),
        pytest.param("<answer>3*5+9+3-3</answer>", 0.0, id="number used again"),
        pytest.param("<answer>35-9-2</answer>", 0.0, id="numbers glued"),
        pytest.param("<answer>3*5+9</answer> <answer>9</answer>", 0.0, id="changed its mind"),
    ],
)
def test_reward_is_one_for_a_right_expression_and_zero_otherwise(response, reward):
    assert Countdown(seed=0).reward(puzzle([9, 3, 5], 24), response) == reward


@pytest.mark.parametrize(
    ("numbers", "target", "expression", "reward"),
    [
        # 8 / (3 - 8 / 3) = 8 / (1/3) = 24, which floating point misses.
        ([3, 3, 8, 8], 24, "8/(3-8/3)", 1.0),
        ([4, 4], 8, "4+4", 1.0),
        ([4, 4], 8, "4+4+0", 0.0),
        ([4, 4], 0, "4-4", 1.0),
    ],
)
def test_a_value_is_exact_and_each_number_is_used_as_often_as_given(
    numbers, target, expression, reward
):
    answer = f"<answer>{expression}</answer>"
    assert Countdown(seed=0).reward(puzzle(numbers, target), answer) == reward


@settings(max_examples=60)
@given(seed=st.integers(0, 9), index=st.integers(0, 10**6), split=st.sampled_from(Split))
def test_every_puzzle_can_be_solved(seed, index, split):
    puzzle = Countdown(seed=seed).prompt(split, index).metadata
    assert puzzle["target"] in reachable(puzzle["numbers"])


@settings(max_examples=60)
@given(index=st.integers(0, 10**6), operators=st.sampled_from(["+", "*", "+-", "+-*", "+-*/"]))
def test_stored_solution_earns_the_reward_with_the_wanted_operators(index, operators):
    environment = Countdown(seed=1, numbers=(2, 5), operators=operators)
    prompt = environment.prompt(Split.TRAIN, index)
    solution = prompt.answer
    assert environment.reward(prompt, f"<answer>{solution}</answer>") == 1.0
    assert set(re.findall(r"[+\-*/]", solution)) <= set(operators)


@settings(max_examples=20)
@given(index=st.integers(0, 10**6))
def test_puzzles_stay_within_their_bounds(index):
    environment = Countdown(seed=0, numbers=(2, 4), values=(5, 12), targets=(20, 40))
    puzzle = environment.prompt(Split.EVALUATION, index).metadata
    assert 2 <= len(puzzle["numbers"]) <= 4
    assert set(puzzle["numbers"]) <= set(range(5, 13))
    assert 20 <= puzzle["target"] <= 40


def test_no_puzzle_is_in_both_splits_even_with_reordered_numbers():
    def items(split, seed):
        environment = Countdown(seed=seed, **EASY)
        puzzles = [environment.prompt(split, index).metadata for index in range(1000)]
        return {(*sorted(puzzle["numbers"]), puzzle["target"]) for puzzle in puzzles}

    assert not items(Split.TRAIN, 0) & items(Split.EVALUATION, 1)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"numbers": 1}, "environment.parameters.numbers: 1 is not an integer from 2 to 8"),
        ({"numbers": [4, 3]}, r"environment.parameters.numbers: \[4, 3\] is empty"),
        ({"values": "1-9"}, "environment.parameters.values: '1-9' is neither"),
        ({"operators": "+^"}, r"environment.parameters.operators: '\+\^' is not a choice"),
        ({"style": "chat"}, "environment.parameters.style: 'chat' is unknown; use one of plain"),
        ({"numbers": 2, "values": 1, "operators": "+"}, "no (train|evaluation) item was found"),
    ],
)
def test_bad_parameter_is_named_when_the_task_is_made(parameters, message):
    with pytest.raises(ValueError, match=message):
        Countdown(seed=0, **parameters)
