"""A model that this engine would sample from wrongly is refused by what is measured."""

import pytest
import torch

from tests.fixtures.families import ATTENTION, OTHER_STATE, family
from vcpo.service.lifecycle import StartError
from vcpo.service.rotary_table import fix_rotary_table
from vcpo_rollout.engines.hf.decoding_check import require_decodable
from vcpo_rollout.engines.hf.engine import HfEngine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ATTENTION)
def test_models_whose_state_are_keys_and_values_pass(kind, dtype):
    model = family(kind).to(dtype)
    fix_rotary_table(model)
    require_decodable(model, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OTHER_STATE)
def test_models_of_another_state_are_refused_with_their_family(kind, dtype):
    with pytest.raises(StartError, match=rf"^spec\.model\.name: engine hf .* family {kind}\b"):
        require_decodable(family(kind).to(dtype), 0)


async def test_the_first_weights_of_an_engine_are_checked(publish):
    model = family("rwkv")
    weights = publish(model, 1)
    engine = HfEngine(
        model, end_token_ids=frozenset(), pad_token_id=0, max_concurrent_sequences=4, seed=0
    )
    gaps = r"alone differ by [\d.]+ nats .* and by [\d.]+ nats .*; use `engine: vllm`"
    with pytest.raises(StartError, match=gaps):
        await engine.swap_weights(weights)
    assert engine.policy_version is None
    await engine.close()


def test_weights_that_are_not_finite_are_for_the_sampler_to_report(make_model):
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    require_decodable(model, 0)
