from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from vcpo_rollout.environments import Split, make_environment

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.models import make_model, warm_start
from examples.models.demonstrations import Part

MODELS = ("sort", "tiny")
"""Those that the repository has; git ignores the others."""


def folder(name):
    return Path(make_model.__file__).parent / name


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return AutoTokenizer.from_pretrained(folder(name))


@pytest.mark.parametrize(
    "task", ["examples.plugins.calculator.calculator:Calculator", "countdown", "sort_digits"]
)
@pytest.mark.parametrize("style", ["plain", "instruct"])
def test_a_model_knows_every_character_of_the_prompts(tokenizer, task, style):
    prompt = make_environment(task, {"style": style}, 0).prompt(Split.TRAIN, 0)
    assert tokenizer.unk_token_id not in tokenizer.encode(prompt.text)


TASKS = {
    name: task for recipe in make_model.RECIPES.values() for name, task in recipe.tasks.items()
}


def rewards(name, error_rate, number=200):
    """Rewards of demonstrations, each played to its environment turn by turn."""
    task, random = TASKS[name], Random(0)
    environment = make_environment(task.environment, task.parameters, 0)
    for index in range(number):
        prompt = environment.prompt(Split.TRAIN, index)
        parts = task.demonstrate(environment, prompt, error_rate=error_rate, random=random)
        conversation = warm_start.begin(environment, prompt)
        for turn, reply in zip(parts[::2], [*parts[1::2], None], strict=True):
            answered = conversation.next_turn(turn.text)
            assert answered == (None if reply is None else reply.text)
        yield conversation.reward()


@pytest.mark.parametrize("name", TASKS)
def test_a_demonstration_without_errors_is_right(name):
    assert set(rewards(name, 0.0)) == {1.0}


def test_only_what_the_model_writes_has_labels():
    tokenizer = warm_start.build_tokenizer()
    parts = [Part("1+2"), Part("=3\n", is_sampled=False), Part("<answer>3</answer>")]
    ids, labels = warm_start.token_batch(tokenizer, [("a=1: ", parts), ("sort 21=", [Part("12")])])
    learned = [[token for token in row if token != warm_start.IGNORED] for row in labels.tolist()]
    assert [tokenizer.decode(row) for row in learned] == [
        "1+2<eos><answer>3</answer><eos>",
        "12<eos>",
    ]
    assert tokenizer.decode(ids[0]) == "a=1: 1+2<eos>=3\n<answer>3</answer><eos>"


def test_a_recipe_from_a_pretrained_model_learns_with_the_weights_of_each_step(
    tmp_path, monkeypatch, capsys
):
    tokenizer = warm_start.build_tokenizer()

    def load(folder):
        return tokenizer, warm_start.build_model(tokenizer)

    monkeypatch.setattr(make_model.smollm2, "load", load)
    recipe = replace(
        make_model.RECIPES["sums"], learn_steps=100, learn_rate=5e-3, warmup_steps=10, batch_size=16
    )
    make_model.make(recipe, tmp_path / "made", seed=0)
    loss = float(capsys.readouterr().out.split("loss ")[1].split()[0])
    assert loss < 2.2  # of ten digits at random: log 10 = 2.3
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert made.dtype is torch.bfloat16
