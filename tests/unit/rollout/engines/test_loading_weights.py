"""A payload is loaded completely or not at all."""

import io
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.fixtures.rollout.models import build_model, parameters_of
from vcpo_rollout.engines.engine import EngineError, PolicyWeights, WeightChanges
from vcpo_rollout.engines.loading_weights import (
    changed_tensors,
    copy_weights,
    read_weights,
    stage_weights,
)
from vcpo_rollout.engines.payload_tensors import write_tensors

NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


def version_of(payload):
    return PolicyWeights(0, payload)


def payload_with(tensors, **changes):
    """The tensors as a payload, some replaced; None leaves one out."""
    merged = {**tensors, **{name.replace("__", "."): value for name, value in changes.items()}}
    return safetensors.torch.save({k: v for k, v in merged.items() if v is not None})


def test_every_parameter_gets_the_published_value():
    published, model = parameters_of(build_model(seed=1)), build_model(seed=2)
    copy_weights(model, read_weights(model, version_of(safetensors.torch.save(published))))
    assert all(torch.equal(value, published[name]) for name, value in model.named_parameters())


@pytest.mark.parametrize("given", [[HEAD], [EMBEDDING], [HEAD, EMBEDDING]], ids=str)
def test_tied_parameters_may_stand_under_any_of_their_names(given):
    tensors = parameters_of(build_model(seed=1, tied=True))
    shared = tensors.pop(EMBEDDING)
    payload = safetensors.torch.save({**tensors, **{name: shared.clone() for name in given}})
    model = build_model(seed=2, tied=True)
    copy_weights(model, read_weights(model, version_of(payload)))
    assert torch.equal(model.lm_head.weight, shared)
    assert torch.equal(model.model.embed_tokens.weight, shared)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model__norm__weight": None}, f"{NORM} is missing"),
        ({"model__norm__weight": torch.zeros(33)}, rf"{NORM} has shape \[33\], not \[32\]"),
        ({"model__norm__weight": torch.zeros(32, dtype=torch.int32)}, f"{NORM} is torch.int32"),
        ({"extra": torch.zeros(1)}, "extra is unknown"),
        ({"lm_head__weight": torch.zeros(40, 32)}, f"{HEAD} differs from {EMBEDDING}"),
    ],
    ids=["missing", "shape", "integer", "unknown", "tied apart"],
)
def test_tensors_that_do_not_fit_are_named(changes, problem):
    model = build_model(tied=True)
    with pytest.raises(EngineError, match=problem):
        read_weights(model, version_of(payload_with(parameters_of(model), **changes)))


def test_weights_that_are_not_numbers_are_read_as_they_are():
    model = build_model()
    payload = payload_with(parameters_of(model), lm_head__weight=torch.full((40, 32), torch.nan))
    found = read_weights(model, version_of(payload))[HEAD]
    assert torch.isnan(found).all()


def test_all_problems_are_reported_at_once_up_to_a_number():
    model = build_model()  # 2 layers of 9 parameters, embedding, norm and head: 21 missing
    with pytest.raises(EngineError, match=r"embed_tokens\.weight is missing.*; 16 more$"):
        read_weights(model, version_of(safetensors.torch.save({})))


@pytest.mark.parametrize("payload", [b"", b"not safetensors", b"\xff" * 64], ids=len)
def test_bytes_that_are_no_safetensors_file_are_refused(payload):
    with pytest.raises(EngineError, match=f"{len(payload)} bytes are not a safetensors file"):
        read_weights(build_model(), version_of(payload))


def test_published_bfloat16_is_held_exactly_in_float32():
    model = build_model()
    rounded = {name: value.bfloat16() for name, value in parameters_of(model).items()}
    copy_weights(model, read_weights(model, version_of(safetensors.torch.save(rounded))))
    assert model.lm_head.weight.dtype is torch.float32
    assert torch.equal(model.lm_head.weight, rounded[HEAD].float())


class TestChanges:
    """Of version 2 the second and fifth element of the embedding differ from version 1."""

    @pytest.fixture
    def weights(self):
        tensors = parameters_of(build_model(tied=True))
        tensors[EMBEDDING].view(-1)[[1, 4]] += 1.0
        changes = WeightChanges(base_policy_version=1, positions={EMBEDDING: np.array([1, 4])})
        payload = safetensors.torch.save(tensors)
        return PolicyWeights(2, payload, changes=changes)

    def test_only_they_are_written_over_the_version_they_change(self, weights):
        model = build_model(tied=True)
        model.model.norm.weight.data.fill_(7.0)
        copy_weights(model, stage_weights(model, weights, in_use=1))
        assert torch.equal(model.lm_head.weight, safetensors.torch.load(weights.payload)[EMBEDDING])
        assert bool((model.model.norm.weight == 7.0).all())

    @pytest.mark.parametrize("in_use", [None, 0, 2])
    def test_over_any_other_version_everything_is_written(self, weights, in_use):
        model = build_model(seed=5, tied=True)
        copy_weights(model, stage_weights(model, weights, in_use=in_use))
        expected = safetensors.torch.load(weights.payload)
        assert all(
            torch.equal(value, expected[name]) for name, value in parameters_of(model).items()
        )

    @pytest.mark.parametrize(("in_use", "names"), [(1, {EMBEDDING}), (0, None), (None, None)])
    def test_their_parameters_are_known_over_the_version_they_change(self, weights, in_use, names):
        assert changed_tensors(build_model(tied=True), weights, in_use=in_use) == names

    def test_their_parameters_have_the_models_first_names(self, weights):
        changes = WeightChanges(base_policy_version=1, positions={HEAD: np.array([0])})
        weights = replace(weights, changes=changes)
        assert changed_tensors(build_model(tied=True), weights, in_use=1) == {EMBEDDING}

    def test_they_are_rounded_as_the_whole_would_be(self, weights):
        whole, changed = build_model(tied=True).bfloat16(), build_model(tied=True).bfloat16()
        copy_weights(whole, stage_weights(whole, weights, in_use=None))
        copy_weights(changed, stage_weights(changed, weights, in_use=1))
        assert torch.equal(whole.lm_head.weight, changed.lm_head.weight)

    def test_a_parameter_that_is_not_flat_in_memory_is_written_whole(self, weights):
        model = build_model(tied=True)
        embedding = model.get_parameter(EMBEDDING)
        embedding.data = torch.zeros_like(embedding).t().contiguous().t()
        copy_weights(model, stage_weights(model, weights, in_use=1))
        assert torch.equal(model.lm_head.weight, safetensors.torch.load(weights.payload)[EMBEDDING])


def test_one_file_is_written_of_tensors():
    published = parameters_of(build_model(seed=1))
    published["scale"], published["empty"] = torch.tensor([0.5]), torch.zeros(1, 0)
    file = io.BytesIO()
    write_tensors(published, file)
    found = safetensors.torch.load(file.getvalue())
    assert found.keys() == published.keys()
    assert all(torch.equal(each, published[name]) for name, each in found.items())
