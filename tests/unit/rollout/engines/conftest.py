"""Tiny random models, and the plain forward pass that every engine is measured against."""

from collections.abc import Sequence

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from vcpo_rollout.engines.engine import GenerationRequest, PolicyWeights

# Wide enough that attention and positions matter: at the usual 0.02 a wrong mask hides in 1e-5.
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1 << 20,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def build_model(*, seed=0, tied=False, sliding_window=None):
    torch.manual_seed(seed)
    if sliding_window is not None:
        return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=sliding_window)).eval()
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).eval()


@torch.no_grad()
def forward_logprobs(
    model, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
):
    """Log-probability of each response token, from one forward pass without cache or padding."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
    logprobs = (logits[len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    return [logprobs[row, token].item() for row, token in enumerate(response)]


def request_for(
    prompt: Sequence[int], *, max_new_tokens=8, temperature=1.0, partial_response=None
) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=tuple(prompt),
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        partial_response=partial_response,
    )


def parameters_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def published(model, policy_version: int) -> PolicyWeights:
    payload = safetensors.torch.save(parameters_of(model))
    return PolicyWeights(policy_version=policy_version, payload=payload)


@pytest.fixture(scope="session")
def make_model():
    return build_model


@pytest.fixture(scope="session")
def reference_logprobs():
    return forward_logprobs


@pytest.fixture(scope="session")
def make_request():
    return request_for


@pytest.fixture(scope="session")
def parameters():
    return parameters_of


@pytest.fixture(scope="session")
def publish():
    return published
