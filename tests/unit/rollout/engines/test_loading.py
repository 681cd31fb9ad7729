"""Models and tokenizers by name, and the error if there is none."""

import huggingface_hub.constants
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import Gemma2Config, GenerationConfig, PreTrainedTokenizerFast

from vcpo.api.workloads import Precision
from vcpo.service.vocabulary import Vocabulary, vocabulary_of
from vcpo_rollout.engines.loading import (
    load_end_token_ids,
    load_model_skeleton,
    load_tokenizer,
    place_model,
)


@pytest.fixture
def folder(tmp_path, make_model):
    """A model folder without weights; token 2 ends a response."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "yes": 1, "<eos>": 2}, unk_token="<unk>"))
    make_model(tied=True).config.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    return tmp_path


def test_a_skeleton_has_the_models_parameters_and_needs_no_weights(folder, make_model):
    skeleton, model = load_model_skeleton(str(folder)), make_model(tied=True)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name: value.shape for name, value in skeleton.named_parameters()} == shapes
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight


def test_a_skeletons_rotary_frequencies_are_those_of_a_loaded_model(folder, make_model):
    skeleton, model = load_model_skeleton(str(folder)), make_model()
    frequencies = skeleton.model.rotary_emb.inv_freq
    assert torch.equal(frequencies, model.model.rotary_emb.inv_freq)


def test_a_soft_cap_of_attention_scores_is_not_left_out(tmp_path):
    # Transformers' sdpa leaves it out, and tokens would be sampled from another distribution.
    Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    ).save_pretrained(tmp_path)
    assert load_model_skeleton(str(tmp_path)).config._attn_implementation == "eager"


def test_a_skeleton_has_the_precision_asked_for(folder):
    skeleton = load_model_skeleton(str(folder), precision=Precision.BFLOAT16)
    assert skeleton.lm_head.weight.dtype is torch.bfloat16
    assert skeleton.model.rotary_emb.inv_freq.dtype is torch.float32


def test_a_skeleton_carries_the_tokens_of_its_folder(folder):
    assert vocabulary_of(load_model_skeleton(str(folder))) == Vocabulary(num_tokens=3)


def test_without_a_tokenizer_every_row_of_a_skeleton_is_a_token(tmp_path, make_model):
    make_model().config.save_pretrained(tmp_path)
    assert vocabulary_of(load_model_skeleton(str(tmp_path))) is None


def test_the_tokenizer_is_the_folders(folder):
    assert load_tokenizer(str(folder)).convert_tokens_to_ids(["yes", "<eos>"]) == [1, 2]


def test_end_tokens_are_the_tokenizers_and_the_configured_ones(folder):
    tokenizer = load_tokenizer(str(folder))
    assert load_end_token_ids(str(folder), tokenizer) == {2}
    GenerationConfig(eos_token_id=[1, 2]).save_pretrained(folder)
    assert load_end_token_ids(str(folder), tokenizer) == {1, 2}


def test_a_model_without_end_token_is_refused(folder):
    tokenizer = load_tokenizer(str(folder))
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"spec\.model\.name.*names no end token"):
        load_end_token_ids(str(folder), tokenizer)


@pytest.mark.parametrize("load", [load_model_skeleton, load_tokenizer])
def test_a_directory_without_a_model_is_refused(load, tmp_path):
    with pytest.raises(ValueError, match=rf"spec\.model\.name: '{tmp_path}' is a directory with"):
        load(str(tmp_path))


@pytest.mark.parametrize("load", [load_model_skeleton, load_tokenizer])
@pytest.mark.parametrize("name", ["/no/such/model", "./model"])
def test_a_path_that_is_no_directory_is_refused(load, name):
    with pytest.raises(ValueError, match=f"'{name}' is not a directory"):
        load(name)


@pytest.mark.parametrize("load", [load_model_skeleton, load_tokenizer])
def test_a_hub_that_is_out_of_reach_is_said_with_the_cure(load, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"use a local directory.*HF_HUB_OFFLINE.*HF_HOME"):
        load("nobody/no-such-model")


def test_a_gpu_without_room_for_the_parameters_is_named_with_the_cure(make_model, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And more.")

    model = make_model()
    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(ValueError, match=r"spec\.model\.name: .*allocate 2\.00 GiB.*maxReplicas"):
        place_model(model, torch.device("cpu"), torch.bfloat16)
