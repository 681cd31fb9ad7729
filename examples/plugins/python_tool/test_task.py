import pytest

from examples.plugins.python_tool.programs import best_sandbox
from examples.plugins.python_tool.python_tool.task import PythonTool
from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.arithmetic import calculate
from vcpo_rollout.environments.environment import MultiTurnEnvironment


def python_tool(seed=0, **parameters):
    return PythonTool(seed=seed, wall_seconds=120, sandbox=best_sandbox(), **parameters)


TASK = python_tool()
PROMPT = Prompt(text="What is 17 * 23?", answer="391")


def block(program):
    return f"Let me see.\n```python\n{program}\n```"


def test_it_speaks_with_the_model():
    assert isinstance(TASK, MultiTurnEnvironment)


def test_the_answer_is_the_value_of_the_question():
    prompt = TASK.prompt(Split.TRAIN, 0)
    question = prompt.text.removeprefix("What is ").partition("?")[0]
    assert str(calculate(question).value) == prompt.answer


def test_no_question_is_in_both_splits():
    def questions(split, seed):
        task = python_tool(seed, numbers=2, values=(1, 9))
        return {task.prompt(split, index).text for index in range(100)}

    assert not questions(Split.TRAIN, 0) & questions(Split.EVALUATION, 1)


def test_a_program_is_run_and_the_answer_after_it_counts():
    exchange = TASK.converse(PROMPT)
    assert exchange.next_turn(block("print(17 * 23)")) == "Output:\n391"
    assert exchange.next_turn("It is <answer>391</answer>") is None
    assert exchange.reward() == 1.0


def test_what_a_program_prints_is_no_answer():
    exchange = TASK.converse(PROMPT)
    exchange.next_turn(block("print('<answer', '391</answer', sep='>')"))
    assert exchange.reward() == 0.0


def test_an_error_comes_back_as_its_text():
    reply = TASK.converse(PROMPT).next_turn(block("1 / 0"))
    assert reply.endswith("ZeroDivisionError: division by zero")


def test_silence_is_said():
    reply = TASK.converse(PROMPT).next_turn(block("x = 1"))
    assert reply == "Output:\n(nothing was printed)"


@pytest.mark.parametrize(
    "turn",
    ["I give up", block("print(1)") + " <answer>391</answer>", "```python\nprint(1)"],
    ids=["no program", "an answer already", "no end of the block"],
)
def test_a_turn_without_a_call_ends_the_conversation(turn):
    assert TASK.converse(PROMPT).next_turn(turn) is None


def test_calls_are_counted():
    exchange = python_tool(calls=1).converse(PROMPT)
    assert exchange.next_turn(block("print(1)")) == "Output:\n1"
    assert exchange.next_turn(block("print(2)")) is None


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"calls": 0}, "environment.parameters.calls: 0 is not an integer from 1 to 64"),
        ({"numbers": [5, 2]}, r"environment.parameters.numbers: \[5, 2\] is empty"),
        ({"wall_seconds": "5"}, "environment.parameters.wall_seconds: '5' is not a number of sec"),
        ({"memory_mebibytes": 1}, "environment.parameters.memory_mebibytes: 1 is not an integer"),
    ],
)
def test_a_bad_parameter_is_named(parameters, said):
    with pytest.raises(ValueError, match=said):
        PythonTool(seed=0, **parameters)
