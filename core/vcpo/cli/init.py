"""`vcpo init`: the files of a new task, ready to be tried and edited."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer

from vcpo.cli.console import OUT, fail, writing

_MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
_RUN: Final = Template("""\
# What is trained, on which task, for how long. Other fields have defaults: vcpo schema --markdown.
#   vcpo try $task.yaml               prompts, answers and rewards; trains nothing
#   vcpo run $task.yaml --steps 5     a short run; without --steps all of it
#   vcpo samples runs/$name-001 --worst
apiVersion: vcpo.dev/v1alpha1
kind: VCPORun
metadata: {name: $name}
spec:
  model: {name: "$model"}  # a directory, or a name on the Hugging Face hub
  environment:
    name: "$task:$class_name"  # $task.py beside this file
    parameters: {highest: 20}  # arguments of the class
  steps: 50  # optimizer steps; each publishes a new version of the model
  batch:
    promptsPerStep: 8
    trajectoriesPerPrompt: 8  # answers compared with each other: equal rewards teach nothing
  sampling: {maxNewTokens: 16}  # longer answers are cut
  algorithm: {maxPolicyLagSteps: 4}  # how old an answer that is trained on may be
  optimizer: {learningRate: 1e-5}
  evaluation: {everySteps: 25, prompts: 64}  # prompts that are never trained on
  rollouts:
    - {name: main, minReplicas: 1, maxReplicas: 1, maxConcurrentSequences: 64}
""")
_TASK: Final = Template('''\
"""The task of $task.yaml: what the model is asked, and what an answer is worth. Edit both."""

import re
from random import Random

from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.draws import draw_item


class $class_name:
    """Sums of two numbers.

    highest: the largest number.
    """

    def __init__(self, *, seed: int, highest: int = 20) -> None:
        self._seed = seed
        self._highest = highest

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return the same prompt for the same seed, split and index, and none in both splits."""
        first, second = draw_item(
            seed=self._seed, split=split, index=index, propose=self._propose, key="{}".format
        )
        text = f"What is {first} + {second}? Answer with the number alone."
        return Prompt(text=text, answer=str(first + second))  # the answer is for `reward` alone

    def reward(self, prompt: Prompt, response: str) -> float:
        """Return 1.0 if the last number of the response is the sum, else 0.0; for any text."""
        return float(re.findall("[0-9]+", response)[-1:] == [prompt.answer])

    def _propose(self, random: Random) -> tuple[int, int]:
        return random.randint(0, self._highest), random.randint(0, self._highest)
''')
_TEST: Final = Template('''\
"""Whether the task is as a run needs it: python -m pytest test_$task.py"""

from $task import $class_name
from vcpo_rollout.environments import Split

TASK = $class_name(seed=0)


def test_the_same_index_gives_the_same_prompt():
    assert TASK.prompt(Split.TRAIN, 7) == $class_name(seed=0).prompt(Split.TRAIN, 7)


def test_no_prompt_is_both_trained_on_and_held_out():
    trained, held_out = ({TASK.prompt(split, index).text for index in range(64)} for split in Split)
    assert not trained & held_out


def test_the_right_answer_is_rewarded_and_any_other_text_is_not():
    prompt = TASK.prompt(Split.TRAIN, 0)
    assert TASK.reward(prompt, f"It is {prompt.answer}.") == 1.0
    for wrong in ("", "I do not know.", f"{prompt.answer}0"):
        assert TASK.reward(prompt, wrong) == 0.0
''')


def init(
    task: Annotated[
        str, typer.Argument(help="Name of the task, for files and class: a Python module's.")
    ] = "sums",
    model: Annotated[
        str, typer.Option(help="Model to train: a directory, or a name on the Hugging Face hub.")
    ] = _MODEL,
    folder: Annotated[Path, typer.Option(help="Folder for the files; it may be new.")] = Path(),
) -> None:
    """Write TASK.yaml, a run file with comments, TASK.py, its environment, and test_TASK.py.

    The environment asks for sums of two numbers; edit its prompts and its reward. `vcpo try
    TASK.yaml` shows what the model answers, `vcpo run TASK.yaml` trains. Existing files stay.

    Exit status: 0; 2 if an option must be fixed first.
    """
    if re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", task) is None or keyword.iskeyword(task):
        fail(f"TASK: {task!r} must be a Python module's name, such as word_problems")
    values = {
        "task": task,
        "name": re.sub("_+", "-", task)[:63].strip("-"),
        "class_name": "".join(part.capitalize() for part in task.split("_")),
        "model": model,
    }
    files = {f"{task}.yaml": _RUN, f"{task}.py": _TASK, f"test_{task}.py": _TEST}
    for name in files:
        if (folder / name).exists():
            fail(f"TASK: {folder / name} exists already; give another name, or remove the file")
    if importlib.util.find_spec(task) is not None:
        fail(f"TASK: {task!r} is the name of an installed module, which {task}.py would hide")
    for name, template in files.items():
        with writing("--folder", folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(template.substitute(values), encoding="utf-8")
        OUT.print(str(folder / name), soft_wrap=True, markup=False, highlight=False)
