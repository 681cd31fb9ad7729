import math
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from tests.fixtures.families import LONG_FACTOR, ORIGINAL, family
from tests.fixtures.learner.dispatcher import make_run
from tests.fixtures.learner.models import llama, qwen2
from vcpo.api.workloads import Precision
from vcpo.service.lifecycle import StartError
from vcpo.service.rotary_table import fix_rotary_table, table_length
from vcpo_learner.model.loading import (
    ModelLoadError,
    account_for,
    load_policy,
    pad_token_id,
    require_all_trained,
)
from vcpo_learner.model.skeleton import build_skeleton, unused_tensors

CONTEXT = 512


def cosines(model, positions):
    table, _ = model.model.rotary_emb(torch.zeros(1), torch.tensor([positions]))
    return table[0, :, :8]


def expected(positions, *, factor):
    """Phi-3's rule, by hand: 8 frequencies of heads of 16, and one scale for all lengths."""
    scale = math.sqrt(1 + math.log(CONTEXT / ORIGINAL) / math.log(ORIGINAL))
    frequencies = [1 / (factor * 1e4 ** (2 * pair / 16)) for pair in range(8)]
    return torch.tensor([[scale * math.cos(at * each) for each in frequencies] for at in positions])


@pytest.mark.parametrize(
    ("context_tokens", "factor"),
    [(None, LONG_FACTOR), (ORIGINAL + 1, LONG_FACTOR), (ORIGINAL, 1.0), (CONTEXT, LONG_FACTOR)],
)
def test_the_factors_of_longrope_follow_from_the_context_of_the_run(context_tokens, factor):
    model = family("phi3 longrope")
    before = model.config.to_dict()
    fix_rotary_table(model, context_tokens)
    for positions in ([0, 1, 2], [0, 5, ORIGINAL - 1], [ORIGINAL - 1]):
        torch.testing.assert_close(cosines(model, positions), expected(positions, factor=factor))
    assert model.config.to_dict() == before


def test_a_table_of_one_length_is_made_where_the_kind_needs_one():
    assert table_length(family("phi3 longrope").config) == CONTEXT
    assert table_length(family("phi3 longrope").config, 30) == 30
    # Beyond its context a model has no positions.
    assert table_length(family("llama dynamic").config, 1000) == 40
    assert table_length(family("gemma3").config, 30) is None


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


@pytest.mark.parametrize(
    ("pad", "end", "expected"), [(7, 8, 7), (None, 8, 8), (None, None, 0)], ids=str
)
def test_short_rows_are_filled_with_the_first_token_there_is(pad, end, expected):
    assert pad_token_id(SimpleNamespace(pad_token_id=pad, eos_token_id=end)) == expected
