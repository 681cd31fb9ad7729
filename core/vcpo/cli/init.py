"""`vcpo init`: the files of a new task, ready to be tried and edited."""

import importlib.util
import json
import keyword
import re
from itertools import combinations_with_replacement
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer

from vcpo.cli.console import fail, say, writing

_MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
_RUN: Final = Template("""\
# What is trained, on which task, for how long. Other fields have defaults: vcpo schema.
#   vcpo try $task.yaml               prompts, answers and rewards; trains nothing
#   vcpo run $task.yaml --steps 5     a short run; without --steps all of it
#   vcpo samples runs/$name-001 --worst
apiVersion: vcpo.dev/v1alpha1
kind: VCPORun
metadata: {name: $name}
spec:
  model: {name: "$model"}  # a directory, or a name on the Hugging Face hub
  environment:
    name: data_set
    parameters: {path: $task.jsonl}  # rows with a prompt and its answer, beside this file
    rewards: [{name: "$task:reward"}]  # a function of $task.py beside this file
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
_REWARD: Final = Template('''\
"""What an answer is worth. Edit it; docs/tasks.md has more of what a reward can be."""

import re


def reward(prompt, response):
    """Return what a response is worth, for any text; the sum counts, and each part is shown.

    prompt.answer is the row's answer, and prompt.metadata has all its columns.
    """
    return {
        "correct": float(re.findall("[0-9]+", response)[-1:] == [prompt.answer]),
        "alone": 0.1 * response.strip().isdigit(),
    }
''')
_TEST: Final = Template('''\
"""Whether the reward is as a run needs it: python -m pytest test_$task.py"""

from $task import reward
from vcpo_rollout.environments import Prompt

PROMPT = Prompt(text="What is 3 + 4?", answer="7")


def test_the_right_answer_is_rewarded_and_best_alone():
    assert reward(PROMPT, "It is 7.") == {"correct": 1.0, "alone": 0.0}
    assert reward(PROMPT, "7") == {"correct": 1.0, "alone": 0.1}


def test_any_other_text_is_not():
    for wrong in ("", "I do not know.", "7 or 8"):
        assert sum(reward(PROMPT, wrong).values()) == 0.0
''')
_HIGHEST: Final = 40


def _rows() -> str:
    """Return all sums of two numbers, each once: 3 + 4 and not 4 + 3."""
    rows = (
        {"prompt": f"What is {a} + {b}? Answer with the number alone.", "answer": f"{a + b}"}
        for a, b in combinations_with_replacement(range(_HIGHEST + 1), 2)
    )
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def init(
    task: Annotated[
        str, typer.Argument(help="Name of the task and its files: a Python module's.")
    ] = "sums",
    model: Annotated[
        str, typer.Option(help="Model to train: a directory, or a name on the Hugging Face hub.")
    ] = _MODEL,
    folder: Annotated[Path, typer.Option(help="Folder for the files; it may be new.")] = Path(),
) -> None:
    """Write TASK.yaml, a run file with comments, TASK.jsonl, its prompts, and TASK.py, its reward.

    The prompts are sums of two numbers; put your rows in their place, and edit the reward, which
    test_TASK.py tests. `vcpo try TASK.yaml` shows what the model answers, `vcpo run TASK.yaml`
    trains. Existing files are not overwritten.

    Exit status: 0; 2 if an option must be fixed first.
    """
    if re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", task) is None or keyword.iskeyword(task):
        fail(f"TASK: {task!r} must be a Python module's name, such as word_problems")
    values = {"task": task, "name": re.sub("_+", "-", task)[:63].strip("-"), "model": model}
    templates = {f"{task}.yaml": _RUN, f"{task}.py": _REWARD, f"test_{task}.py": _TEST}
    files = {name: each.substitute(values) for name, each in templates.items()}
    files[f"{task}.jsonl"] = _rows()
    for name in files:
        if (folder / name).exists():
            fail(f"TASK: {folder / name} exists already; give another name, or remove the file")
    if importlib.util.find_spec(task) is not None:
        fail(f"TASK: {task!r} is the name of an installed module, which {task}.py would hide")
    for name, text in files.items():
        with writing("--folder", folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        say(str(folder / name))
    say(f"Edit {task}.jsonl and {task}.py, then: vcpo try {folder / f'{task}.yaml'}")
