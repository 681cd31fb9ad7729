from pathlib import Path

import pytest

from vcpo_rollout.environments import Split, make_environment

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.models import make_model, warm_start

MODELS = sorted(make_model.RECIPES.keys() - {"sort_5m"})
"""Those that the repository has; git ignores the large one."""


def folder(name):
    return Path(make_model.__file__).parent / name


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return AutoTokenizer.from_pretrained(folder(name))


@pytest.fixture(scope="module")
def model(name):
    return AutoModelForCausalLM.from_pretrained(folder(name))


@pytest.mark.parametrize(
    "text", ["24 from 3 5 9: ", "sort 52914=", "<answer>(3+5)*9</answer>", "a=12 b*a: ", "=72\n"]
)
def test_tokens_give_back_the_text(tokenizer, text):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_answer_tags_are_one_token_each_and_other_characters_too(tokenizer):
    assert len(tokenizer.encode("<answer>3+5</answer>", add_special_tokens=False)) == 5


@pytest.mark.parametrize(
    "task", ["examples.plugins.calculator.calculator:Calculator", "countdown", "sort_digits"]
)
@pytest.mark.parametrize("style", ["plain", "instruct"])
def test_a_model_knows_every_character_of_the_prompts(tokenizer, task, style):
    prompt = make_environment(task, {"style": style}, 0).prompt(Split.TRAIN, 0)
    assert tokenizer.unk_token_id not in tokenizer.encode(prompt.text)


def test_padding_and_end_are_different_tokens(tokenizer):
    assert None not in (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_folder_stays_small(name):
    assert sum(path.stat().st_size for path in folder(name).iterdir()) < 1_000_000


def test_a_model_is_float32_and_ends_with_the_tokenizers_end(model, tokenizer):
    assert {str(weight.dtype) for weight in model.parameters()} == {"torch.float32"}
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(
    ("name", "task"),
    [(name, task) for name in MODELS for task in make_model.RECIPES[name].tasks],
    indirect=["name"],
)
def test_a_start_is_often_wrong_and_its_likeliest_answers_are_right_more_often(
    name, model, tokenizer, task
):
    recipe = make_model.RECIPES[name]
    environment = make_environment(recipe.tasks[task].environment, recipe.tasks[task].parameters, 0)
    sampled, greedy = (
        warm_start.accuracy(
            model,
            tokenizer,
            environment,
            max_turn_tokens=recipe.max_turn_tokens,
            sample=sample,
            num_prompts=80,
        )
        for sample in (True, False)
    )
    # Four deviations of a share of 80 prompts are at most 0.22.
    assert 0.05 < sampled < 0.6
    assert greedy > sampled + 0.15
