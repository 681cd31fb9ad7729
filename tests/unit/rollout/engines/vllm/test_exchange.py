"""The tensors of a version that go to vLLM."""

import pytest

from vcpo_rollout.engines.vllm.exchange import tensors_to_send

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
