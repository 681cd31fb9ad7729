from random import Random

import pytest

from vcpo_rollout.environments import Split, make_environment

pytest.importorskip("torch")

from examples.models import warm_start
from examples.models.demonstrations import Part
from examples.models.make_model import RECIPES

TASKS = {name: task for recipe in RECIPES.values() for name, task in recipe.tasks.items()}


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


def test_the_same_seed_gives_the_same_folder(tmp_path):
    import torch

    tokenizer = warm_start.build_tokenizer()
    for folder in ("first", "second"):
        torch.manual_seed(0)
        model = warm_start.build_model(tokenizer)
        shown = iter([("sort 21=", [Part("12")]), ("sort 312=", [Part("123")])] * 4)
        warm_start.train(
            model, tokenizer, shown, name="learn", steps=2, batch_size=4, learning_rate=2e-3
        )
        warm_start.save(model, tokenizer, tmp_path / folder)
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()
