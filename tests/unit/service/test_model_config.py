"""Which models can be the policy of a run, by their configuration alone."""

from __future__ import annotations

import re

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vcpo.service.model_config import (
    WITH_LANGUAGE_MODEL,
    config_problem,
    is_known_family,
)

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
CUSTOM = {
    "model_type": "house_model",
    "architectures": ["HouseForCausalLM"],
    "auto_map": {"AutoConfig": "house.Config", "AutoModelForCausalLM": "house.Model"},
}
IMAGES = {"vision_config": {"depth": 1}, "text_config": {"hidden_size": 8}}


def problem_of(config, *, is_known=True, trust_remote_code=False):
    found = config_problem(config, "m", is_known=is_known, trust_remote_code=trust_remote_code)
    return None if found is None else str(found)


def quantized(**settings):
    return {**LLAMA, "quantization_config": settings}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (quantized(quant_method="gptq", bits=4), r"\(gptq\).*give the checkpoint that it was made"),
        (quantized(quant_method="awq", bits=4), r"\(awq\).*give the checkpoint that it was made"),
        (quantized(load_in_4bit=True), r"\(bitsandbytes\).*from_pretrained\(name\)\.dequantize"),
        (quantized(quant_method="fp8"), r"\(fp8\).*FineGrainedFP8Config\(dequantize=True\)"),
        (quantized(quant_method="mxfp4"), r"\(mxfp4\).*Mxfp4Config\(dequantize=True\)"),
        (quantized(quant_algo="NVFP4"), r"\(NVFP4\)"),
        (
            {**LLAMA, "compression_config": {"quant_method": "compressed-tensors"}},
            r"\(compressed-tensors\).*CompressedTensorsConfig\(dequantize=True\)",
        ),
        ({"model_type": "gemma3", "text_config": quantized(quant_method="gptq")}, r"\(gptq\)"),
        (
            {"model_type": "mistral3", **IMAGES},
            r"a model of images, video or sound \(mistral3\).*give a text-only checkpoint",
        ),
        (
            {"model_type": "t5", "is_encoder_decoder": True},
            r"an encoder-decoder model \(t5\); give one with a decoder alone",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            r"is a BertForMaskedLM, .*give a causal language model",
        ),
        (
            {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
            r"is a LlamaForSequenceClassification, .*give a causal language model",
        ),
    ],
)
def test_each_kind_that_cannot_be_trained_is_named_with_its_own_cure(config, said):
    problem = problem_of(config)
    assert problem.startswith("spec.model.name: is a")
    assert problem.endswith("(got 'm')")
    assert re.search(said, problem), problem


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "quantization_config": None},
        {"model_type": "llama"},  # nothing is known of it
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], **IMAGES},
        {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], **IMAGES},
        # A known family needs no code of its repository, though it has some.
        {**LLAMA, "auto_map": CUSTOM["auto_map"]},
    ],
)
def test_a_causal_model_is_no_problem(config):
    assert problem_of(config) is None


def test_code_of_a_repository_needs_the_users_word():
    problem = problem_of(CUSTOM, is_known=False)
    assert problem.startswith("spec.model.trustRemoteCode: 'm' needs the Python code of its own")
    assert problem_of(CUSTOM, is_known=False, trust_remote_code=True) is None


def test_a_family_that_nobody_has_code_for_asks_for_a_newer_library():
    said = "a family (house_model) that the installed transformers lacks; install a newer one"
    assert said in problem_of({"model_type": "house_model"}, is_known=False)


def test_every_causal_family_of_the_library_is_known_and_none_is_refused_by_its_class():
    for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        config = {"model_type": family, "architectures": [name] if isinstance(name, str) else name}
        assert is_known_family(config), family
        assert problem_of(config) is None, family
    assert not is_known_family({"model_type": "house_model"})


def test_families_with_other_inputs_are_those_that_the_library_loads_for_text():
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() >= WITH_LANGUAGE_MODEL
