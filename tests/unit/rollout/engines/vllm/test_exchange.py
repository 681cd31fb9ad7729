"""What goes to vLLM: the parameters of a request, and the tensors of a version."""

from dataclasses import replace

import numpy as np
import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, WeightVersionSpan

from vcpo.wire.limits import MAX_ROUTE_BYTES
from vcpo.wire.packing import ExpertRoutes
from vcpo.wire.trajectory import PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import GenerationRequest
from vcpo_rollout.engines.seeds import token_seed
from vcpo_rollout.engines.vllm.exchange import sampling_params, tensors_to_send, to_generation

EMBEDDING = "model.embed_tokens.weight"
FIRST = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"}
SECOND = {
    "model.layers.1.mlp.experts.0.up_proj.weight",
    "model.layers.1.mlp.experts.1.up_proj.weight",
}
END = {"model.norm.weight", "lm_head.weight"}
ALL = {EMBEDDING} | FIRST | SECOND | END


@pytest.mark.parametrize(
    ("changed", "sent"),
    [
        (None, ALL),
        (set(), set()),
        ({EMBEDDING}, {EMBEDDING}),
        ({"model.layers.0.self_attn.q_proj.weight"}, FIRST),
        ({"model.layers.1.mlp.experts.1.up_proj.weight", EMBEDDING}, SECOND | {EMBEDDING}),
        ({"lm_head.weight"}, END),
        (ALL, ALL),
    ],
    ids=["unknown", "none", "embedding", "one of q, k and v", "an expert", "head", "all"],
)
def test_of_a_decoder_layer_all_is_sent_or_nothing(changed, sent):
    names = [EMBEDDING, *sorted(FIRST), *sorted(SECOND), *sorted(END)]
    found = tensors_to_send(dict.fromkeys(names), None if changed is None else frozenset(changed))
    assert found.keys() == sent


def test_a_request_has_the_seed_of_its_first_new_token():
    request = GenerationRequest(prompt_token_ids=(3, 4), temperature=1.0, max_new_tokens=8, seed=11)
    partial = PartialResponse(
        token_ids=(5, 6, 7),
        logprobs=(-0.5,) * 3,
        version_spans=(VersionSpan(policy_version=0, num_tokens=3),),
    )
    assert sampling_params(request, frozenset()).seed == token_seed(11, 2)
    resumed = replace(request, partial_response=partial)
    assert sampling_params(resumed, frozenset()).seed == token_seed(11, 5)
    assert sampling_params(replace(request, seed=None), frozenset()).seed is None


def finished(routes):
    """Two tokens of version 3, as vLLM returns them."""
    return CompletionOutput(
        index=0,
        text="",
        token_ids=[5, 6],
        cumulative_logprob=None,
        logprobs=[{5: Logprob(-0.5)}, {6: Logprob(-1.0)}],
        finish_reason="length",
        routed_experts=routes,
        weight_versions=[WeightVersionSpan(start=0, end=2, version="3")],
    )


@pytest.mark.parametrize(
    ("keys_version", "ages"),
    [(None, (0, 0, 0)), (3, (0, 2, 0)), (1, (2, 4, 0)), (7, (0, 2, 0))],
)
def test_spans_say_how_old_the_keys_are_that_they_read(keys_version, ages):
    # Version 2 comes after 5: a learner began again, and what was kept is gone.
    spans = [
        WeightVersionSpan(start=at, end=at + 1, version=str(version))
        for at, version in enumerate((3, 5, 2 if keys_version != 1 else 1))
    ]
    output = replace(
        finished(None), token_ids=[5, 6, 5], logprobs=[{5: Logprob(-1.0), 6: Logprob(-1.0)}] * 3
    )
    output.weight_versions = spans
    found = to_generation(output, None, keys_version=keys_version).version_spans
    assert tuple(span.key_age_versions for span in found) == ages


@pytest.mark.parametrize(("dtype", "is_wide"), [(np.uint8, False), (np.uint16, True)])
def test_routes_are_taken_as_vllm_returns_them(dtype, is_wide):
    # Three tokens, two layers, one choice; vLLM returns routes of the prompt too.
    numbers = np.array([[[1], [2]], [[3], [0]], [[2], [1]]], dtype=dtype)
    assert to_generation(finished(numbers), None).expert_routes == ExpertRoutes(
        experts=numbers.tobytes(), num_layers=2, num_choices=1, is_wide=is_wide
    )


def test_without_routes_a_response_has_none_and_of_too_many_it_has_the_first():
    for routes in (None, np.zeros((0, 3, 2), dtype=np.uint8)):
        assert to_generation(finished(routes), None).expert_routes is None
    too_many = np.zeros((MAX_ROUTE_BYTES, 3, 2), dtype=np.uint16)
    routes = to_generation(finished(too_many), None).expert_routes
    assert routes.num_tokens == MAX_ROUTE_BYTES // 12
