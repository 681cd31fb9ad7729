import pytest
import safetensors.torch
import torch

from tests.fixtures.learner.dispatcher import make_run
from vcpo.api.workloads import Quantization
from vcpo_rollout.engines.adapters import AdapterUse
from vcpo_rollout.engines.engine import PolicyWeights
from vcpo_rollout.engines.loading import load_state
from vcpo_rollout.weights.postprocess import LoraMerge, WeightPostprocessing, make_postprocessing
from vcpo_rollout.weights.quantize_and_noise import QuantizationAndNoise

TINY = "examples/models/tiny"


def postprocessing_for(adapters=None, **sections):
    spec = make_run(**sections).spec
    group = spec.rollouts[0]
    return make_postprocessing(spec, group, seed=0, rounding=group.quantization, adapters=adapters)


def test_a_group_that_asks_for_nothing_takes_versions_as_they_are():
    assert postprocessing_for() is None


def test_a_groups_noise_lasts_as_long_as_the_run():
    found = postprocessing_for(steps=30, rollouts=[{"name": "a", "noise": {"stages": 3}}])
    (transform,) = found.transforms
    # Ten steps each: none, 0.01 as by default, 0.0001.
    sigmas = [transform.noise.sigma(step) for step in (9, 10, 20)]
    assert sigmas == pytest.approx([0.0, 0.01, 0.0001])


def test_adapters_are_merged_before_anything_is_rounded():
    found = postprocessing_for(
        AdapterUse.MERGED,
        model={"name": TINY, "lora": {"rank": 1, "alpha": 3}},
        rollouts=[{"name": "a", "quantization": "int8"}],
    )
    merge, transform = found.transforms
    assert isinstance(merge, LoraMerge)
    assert merge.scale == 3.0
    assert merge.base.keys() == load_state(TINY).keys()
    assert isinstance(transform, QuantizationAndNoise)
    assert transform.quantization is Quantization.INT8


def test_what_the_engine_quantizes_itself_comes_to_it_as_it_was_published():
    spec = make_run(rollouts=[{"name": "a", "quantization": "fp8"}]).spec
    found = make_postprocessing(
        spec, spec.rollouts[0], seed=0, rounding=Quantization.NONE, adapters=None
    )
    assert found is None


def test_adapters_that_the_engine_serves_come_to_it_as_they_were_published():
    assert postprocessing_for(AdapterUse.SERVED, model={"name": TINY, "lora": {}}) is None


def test_transforms_follow_one_another_from_file_to_file():
    def double(tensors, policy_version):
        return {name: each * 2 for name, each in tensors.items()}

    def add_version(tensors, policy_version):
        return {name: each + policy_version for name, each in tensors.items()}

    payload = safetensors.torch.save({"a": torch.tensor([1.0, 2.0])})
    found = WeightPostprocessing(transforms=[double, add_version])(PolicyWeights(5, payload))
    assert safetensors.torch.load(found.payload)["a"].tolist() == [7.0, 9.0]


def test_a_model_that_is_nowhere_is_named():
    with pytest.raises(ValueError, match=r"spec\.model\.name"):
        postprocessing_for(AdapterUse.MERGED, model={"name": "no/such/model/here", "lora": {}})
