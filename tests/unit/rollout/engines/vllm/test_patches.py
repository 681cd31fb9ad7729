"""Which models vLLM patches in place."""

from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch.nn import Linear, Module, Parameter
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import composed_weight_loader as composed
from vllm.model_executor.model_loader.weight_utils import default_weight_loader as copy

from vcpo_rollout.engines.vllm.worker import FileTransfer, WeightFile, obstacle_in


class OneVector(Module):
    def __init__(self, loader):
        super().__init__()
        self.a = Parameter(torch.zeros(3), requires_grad=False)
        self.a.weight_loader = loader

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).weight_loader(self.a, tensor)
        return {"a"}


def load_integers(param, loaded_weight):
    param.copy_(loaded_weight.int())


def load(model, values, folder):
    text = SimpleNamespace(tie_word_embeddings=False)
    of_model = SimpleNamespace(hf_text_config=text, dtype=torch.float32)
    config = SimpleNamespace(parallel_config=None, model_config=of_model)
    transfer = FileTransfer(None, config, torch.device("cpu"), model)
    path = folder / "version.safetensors"
    safetensors.torch.save_file({"a": torch.tensor(values)}, path)
    transfer.receive_weights(WeightFile(path=path, shapes=None))
    return transfer


@pytest.mark.parametrize(
    ("loader", "held", "obstacle"),
    [
        (copy, [1.0, 2.0, 3.0], ""),
        (composed(copy, torch.neg), [-1.0, -2.0, -3.0], "a patch changes what it does not name"),
        (load_integers, [1.0, 2.0, 3.0], "vLLM cannot patch it: NotImplementedError: Sparse"),
    ],
)
def test_a_model_that_a_patch_of_nothing_changes_keeps_its_full_set(
    tmp_path, loader, held, obstacle
):
    model = OneVector(loader)
    record_metadata_for_reloading(model)
    transfer = load(model, [1.0, 2.0, 3.0], tmp_path)
    assert transfer.obstacle[: len(obstacle) or None] == obstacle
    assert model.a.tolist() == held


def test_a_parameter_in_a_shorter_type_than_its_model_keeps_all_digits_of_a_version(tmp_path):
    model = OneVector(copy)
    model.a.data = model.a.data.bfloat16()
    record_metadata_for_reloading(model)
    load(model, [0.1, 0.2, 0.3], tmp_path)
    assert torch.equal(model.a, torch.tensor([0.1, 0.2, 0.3]))


def test_a_layer_with_packed_or_converted_weights_is_an_obstacle():
    model = torch.nn.Sequential(Linear(2, 2), Linear(2, 2))
    assert not obstacle_in(model)
    model[1].quant_method = object()
    assert "weights of 1 (Linear)" in obstacle_in(model)
    model[0].weight.data = torch.empty(0)
    assert "weights of 0 (Linear)" in obstacle_in(model)
