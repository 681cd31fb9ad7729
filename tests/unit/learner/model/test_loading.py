from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.fixtures.learner.checkpoints import write_tensor_files
from tests.fixtures.learner.dispatcher import make_run
from tests.fixtures.learner.models import llama, qwen2
from vcpo.api.workloads import Model, Precision
from vcpo.service.lifecycle import StartError
from vcpo_learner.model.loading import (
    ModelLoadError,
    load_policy,
    pad_token_id,
    policy_tensors,
    require_all_trained,
)
from vcpo_learner.model.model_folder import ModelExport

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def broken_folder(tmp_path):
    """A model whose weights are no safetensors file."""
    llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    return tmp_path


@pytest.mark.parametrize(
    ("precisions", "model", "published"),
    [
        ("float32", {}, Precision.FLOAT32),
        ("bfloat16", {}, Precision.BFLOAT16),
        ("bfloat16 float32", {}, Precision.FLOAT32),
        ("bfloat16", {"lora": {}}, Precision.FLOAT32),
    ],
)
def test_no_group_gets_less_than_it_generates_with(precisions, model, published):
    groups = [
        {"name": f"group-{number}", "precision": precision}
        for number, precision in enumerate(precisions.split())
    ]
    run = make_run(rollouts=groups, model={"name": "tiny", **model})
    assert run.spec.published_precision is published


def test_published_tensors_do_not_change_with_the_model():
    model = llama()
    tensors = policy_tensors(model)
    before = tensors[HEAD].clone()
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert torch.equal(tensors[HEAD], before)


def test_a_model_that_is_nowhere_is_an_error_with_field_value_and_cure(tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(ModelLoadError) as caught:
        load_policy(missing, None)
    message = str(caught.value)
    assert message.startswith(f"spec.model.name: '{missing}' is not a directory; relative paths")
    assert "\n" not in message


def test_damaged_weights_are_the_same_error(broken_folder):
    with pytest.raises(ModelLoadError, match=r"spec\.model\.name: .* \(SafetensorError"):
        load_policy(str(broken_folder), None)


def test_a_model_whose_tokenizer_has_no_files_is_refused(tmp_path):
    qwen2().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="no token for text; its files are missing"):
        load_policy(str(tmp_path), None)


def test_a_parameter_that_an_architecture_never_trains_is_named_with_the_cure():
    config = CONFIG_MAPPING["hrm_text"](
        vocab_size=23,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    with pytest.raises(
        StartError, match=r"spec\.model\.name: .* never trains its .*z_L_init.*lora"
    ):
        require_all_trained(AutoModelForCausalLM.from_config(config))
    require_all_trained(llama())


def test_the_saved_policy_can_be_loaded_again(tmp_path):
    model, tokenizer = load_policy("examples/models/tiny", None)
    tensors = write_tensor_files(tmp_path / "tensors", model)
    exporting = ModelExport("run", Model(name="tiny"), model, tokenizer)
    exporting.write_model(tmp_path / "model", tensors, step=1)
    again, _ = load_policy(str(tmp_path / "model"), None)
    for name, tensor in policy_tensors(model).items():
        assert torch.equal(tensor, policy_tensors(again)[name]), name


@pytest.mark.parametrize(
    ("pad", "end", "expected"), [(7, 8, 7), (None, 8, 8), (None, None, 0)], ids=str
)
def test_short_rows_are_filled_with_the_first_token_there_is(pad, end, expected):
    assert pad_token_id(SimpleNamespace(pad_token_id=pad, eos_token_id=end)) == expected
