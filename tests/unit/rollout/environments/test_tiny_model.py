from pathlib import Path

import pytest

from vcpo_rollout.environments import Split, make_environment

TINY = Path(__file__).parents[4] / "examples" / "models" / "tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(TINY)


@pytest.mark.parametrize("text", ["24 from 3 5 9: ", "sort 52914=", "<answer>(3+5)*9</answer>"])
def test_tokens_of_the_tiny_model_give_back_the_text(tokenizer, text):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_answer_tags_are_one_token_each_and_other_characters_too(tokenizer):
    assert len(tokenizer.encode("<answer>3+5</answer>", add_special_tokens=False)) == 5


@pytest.mark.parametrize("name", ["countdown", "sort_digits"])
@pytest.mark.parametrize("style", ["plain", "instruct"])
def test_tiny_model_knows_every_character_of_the_prompts(tokenizer, name, style):
    prompt = make_environment(name, {"style": style}, 0).prompt(Split.TRAIN, 0)
    assert tokenizer.unk_token_id not in tokenizer.encode(prompt.text)


def test_padding_and_end_are_different_tokens(tokenizer):
    assert None not in (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_folder_of_the_tiny_model_stays_small():
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 1_500_000


def test_tiny_model_is_float32_and_ends_with_the_tokenizers_end(tokenizer):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY)
    assert {str(weight.dtype) for weight in model.parameters()} == {"torch.float32"}
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
