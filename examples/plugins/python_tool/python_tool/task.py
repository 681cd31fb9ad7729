"""Arithmetic with a Python tool: a small task in which a model acts and reads the result.

The model may write a program in a fenced block and end its turn. The program runs in a sandbox
(`runner`), and its output is the next message.
"""

import re
from dataclasses import dataclass, field
from random import Random
from typing import Final

from vcpo_rollout.environments.answers import extract_answer
from vcpo_rollout.environments.arithmetic import calculate
from vcpo_rollout.environments.draws import draw_item
from vcpo_rollout.environments.environment import Conversation, Prompt, Split
from vcpo_rollout.environments.parameters import parse_integer, parse_span

from .parameters import parse_limits, parse_sandbox
from .runner import Sandbox, SandboxLimits, run_python

_PROGRAM: Final = re.compile(r"```python\n(.*?)```", re.DOTALL)
_OPERATORS: Final = "+-*"
_TEXT: Final = (
    "What is {expression}? You may run Python up to {calls} times: end your turn with a block that "
    "begins with ```python and ends with ```, and what it prints comes back. "
    "Give the number alone in <answer> tags, for example <answer>42</answer>."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTool:
    """The task; its reward is 1.0 for the right number in the last turn and 0.0 otherwise.

    Raises ValueError, naming the parameter, when a setting is out of bounds, and when no program
    can run in the sandbox on this system.
    """

    seed: int
    """Decides which question each index has."""

    numbers: tuple[int, int] = (3, 5)
    """Fewest and most numbers in a question, 2 to 16."""

    values: tuple[int, int] = (10, 9999)
    """Smallest and largest number, 1 to 1,000,000."""

    calls: int = 3
    """Largest number of programs, 1 to 64; a further one ends the conversation."""

    wall_seconds: float = 5.0
    """Wall-clock time of a program, up to 600."""

    memory_mebibytes: int = 512
    """Memory of a program, 64 to 65,536."""

    output_characters: int = 2000
    """Length of the output shown, 100 to 100,000; the middle of a longer one is left out."""

    sandbox: Sandbox = Sandbox.BUBBLEWRAP
    """The sandbox that keeps programs from the worker's keys, files and network; `pod` runs them as
    the worker's user, with limits only."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "numbers", parse_span("numbers", self.numbers, lowest=2, highest=16)
        )
        object.__setattr__(
            self, "values", parse_span("values", self.values, lowest=1, highest=1_000_000)
        )
        parse_integer("calls", self.calls, lowest=1, highest=64)
        parse_integer("output_characters", self.output_characters, lowest=100, highest=100_000)
        self._limits()  # checks the others
        object.__setattr__(self, "sandbox", parse_sandbox(self.sandbox))

    def prompt(self, split: Split, index: int) -> Prompt:
        expression = draw_item(
            seed=self.seed,
            split=split,
            index=index,
            propose=self._propose,
            key="python_tool/{}".format,
        )
        calculation = calculate(expression)
        assert calculation is not None
        return Prompt(
            text=_TEXT.format(expression=expression, calls=self.calls),
            answer=str(calculation.value),
        )

    def reward(self, prompt: Prompt, response: str) -> float:
        return 1.0 if extract_answer(response) == prompt.answer else 0.0

    def converse(self, prompt: Prompt) -> Conversation:
        return _Exchange(task=self, prompt=prompt, calls_left=self.calls)

    def run(self, program: str) -> str:
        """Run a program within the limits and return its output."""
        return run_python(program, self._limits(), self.sandbox)

    def _limits(self) -> SandboxLimits:
        return parse_limits(
            self.wall_seconds, self.memory_mebibytes, output_characters=self.output_characters
        )

    def _propose(self, random: Random) -> str:
        count = random.randint(*self.numbers)
        terms = [str(random.randint(*self.values))]
        for _ in range(count - 1):
            terms += [random.choice(_OPERATORS), str(random.randint(*self.values))]
        return " ".join(terms)


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """One conversation: each turn may run one program; a turn without one ends it."""

    task: PythonTool
    prompt: Prompt
    calls_left: int
    last_turn: str = field(default="", init=False)

    def next_turn(self, response: str) -> str | None:
        self.last_turn = response
        programs = _PROGRAM.findall(response)
        if not programs or self.calls_left == 0 or extract_answer(response) is not None:
            return None
        self.calls_left -= 1
        return f"Output:\n{self.task.run(programs[-1]) or '(nothing was printed)'}"

    def reward(self) -> float:
        return self.task.reward(self.prompt, self.last_turn)
