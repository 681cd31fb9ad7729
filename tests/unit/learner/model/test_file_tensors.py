"""Files of a model that do not fit its architecture are refused or told, by the tensors' names."""

import pytest
import safetensors.torch
import torch
from transformers import AutoTokenizer

from tests.fixtures.learner.models import llama
from vcpo.service.lifecycle import StartError
from vcpo_learner.model.loading import account_for, load_policy
from vcpo_learner.model.skeleton import build_skeleton, unused_tensors

TINY = "examples/models/tiny"
NORM = "model.norm.weight"


def save(folder, *, without=(), extra=None):
    """A model's folder, some of its tensors missing and some too many."""
    torch.manual_seed(0)
    model = llama()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {
        name: each
        for name, each in safetensors.torch.load_file(file).items()
        if name not in without
    }
    safetensors.torch.save_file(tensors | (extra or {}), file, {"format": "pt"})
    return str(folder)


def test_a_model_whose_files_lack_a_parameter_is_refused_by_its_name(tmp_path):
    name = save(tmp_path, without=[NORM])
    with pytest.raises(StartError, match=rf"spec\.model\.name: .* no values for {NORM}; they"):
        load_policy(name, None)


def test_many_missing_parameters_are_counted():
    model = llama()
    missing = [name for name, _ in model.named_parameters()]
    with pytest.raises(StartError, match=rf"and {len(missing) - 5} more; "):
        account_for("m", model, missing=missing, unused=())


def test_tensors_without_a_place_are_told_by_name(tmp_path, caplog):
    name = save(tmp_path, extra={"mtp.weight": torch.ones(2), "router.bias": torch.ones(1)})
    load_policy(name, None)
    assert "no place for: mtp.weight, router.bias; they are neither" in caplog.text


def test_tensors_that_the_architecture_leaves_out_are_no_matter(caplog):
    model = llama()
    model._keys_to_ignore_on_load_unexpected = {r"^mtp\."}
    account_for("m", model, missing=(), unused=["mtp.weight"])
    assert not caplog.text


def test_a_buffer_that_the_files_lack_is_told_and_keeps_its_initial_value(caplog):
    model = llama()
    model.register_buffer("bias", torch.zeros(2))
    account_for("m", model, missing=["bias"], unused=())
    assert "do not hold the buffers bias; they have their initial values" in caplog.text


def test_ranks_that_read_their_own_slices_know_what_has_no_place(tmp_path):
    name = save(tmp_path, extra={"router.bias": torch.ones(1)})
    assert unused_tensors(tmp_path, build_skeleton(name, None)) == {"router.bias"}
