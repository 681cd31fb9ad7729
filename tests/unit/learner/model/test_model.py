"""Versions in shards: what each rank publishes, and all of them together, bit for bit."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from tests.fixtures.families import LONG_FACTOR, ORIGINAL, family
from tests.fixtures.learner.dispatcher import make_run
from tests.fixtures.learner.models import llama, qwen2, with_buffers
from tests.fixtures.learner.ranks import run_ranks
from tests.fixtures.weight_changes import store_in_process
from vcpo.api.workloads import Lora, Model, Precision
from vcpo.service.lifecycle import StartError
from vcpo.service.rotary_table import fix_rotary_table, table_length
from vcpo.wire.deltas import elements_of, write_changes
from vcpo.wire.weights import tensor_sections, verify
from vcpo_learner.model.loading import (
    ModelLoadError,
    account_for,
    load_policy,
    pad_token_id,
    require_all_trained,
)
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.model.published_state import (
    PublishedState,
    changes_on_cpu,
    changes_on_device,
    own_rows,
)
from vcpo_learner.model.skeleton import build_skeleton, load_on_ranks, unused_tensors
from vcpo_learner.policy_state import persistent_buffers
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.ranks.sharding import local_part, place_model
from vcpo_rollout.engines.loading import load_state

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


def test_a_head_without_values_is_refused_with_the_tie_that_may_be_missing(tmp_path):
    name = save(tmp_path, without=[HEAD])
    with pytest.raises(StartError, match=r"head is the embeddings, tie_word_embeddings: true in"):
        load_policy(name, None)


def test_files_of_another_shape_are_refused_by_tensor_and_shapes(tmp_path):
    name = save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    said = r"spec\.model\.name: .* files hold model.layers.0.mlp.down_proj.weight as \[.*48\]; "
    with pytest.raises(StartError, match=said):
        load_policy(name, None)
    with pytest.raises(ValueError, match=said):
        load_state(name)


def test_files_that_are_cut_are_refused_by_learner_and_worker(tmp_path):
    name = save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"{")
    for load in (load_policy, load_state):
        with pytest.raises((StartError, ValueError), match=r"spec\.model\.name: .* header"):
            load(name, revision=None)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_tensor(tmp_path, number):
    name = save(tmp_path, extra={NORM: torch.full((16,), number)})
    said = f"holds NaN or infinity in {NORM}; fetch its files again"
    with pytest.raises(StartError, match=said):
        load_policy(name, None)
    with pytest.raises(StartError, match=said):
        load_on_ranks(Model(name=name), Ranks(device=torch.device("cpu")), Precision.FLOAT32)


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


VERSIONS = 4


def trained(model):
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def base():
    torch.manual_seed(0)
    return llama(tied=True)


def routed():
    return with_buffers(base())


def with_adapters():
    model = base()
    add_adapters(model, Lora(rank=2))
    return model


def values(model, version):
    """All parameters of a version, by name: a few change each time, in version 2 half a tensor."""
    generator = torch.Generator().manual_seed(version)
    found = {}
    for name, each in trained(model).items():
        chosen = torch.rand(each.shape, generator=generator) < 0.05
        if version == 2:
            chosen[: len(each) // 2] = True
        found[name] = chosen * torch.randn(each.shape, generator=generator)
    return found


@torch.no_grad()
def publish(model, ranks, precision, starts):
    """The rank's shard of each version: its bytes, and whether it is a delta."""
    parameters = PublishedState(model)
    store = store_in_process("i", lambda: 0.0)
    shards = []
    for version in range(VERSIONS):
        if version:
            for name, change in values(model, version).items():
                own = local_part(trained(model)[name])
                begin = starts.get(name, 0)
                own += change[begin : begin + len(own)]
            for buffer in persistent_buffers(model).values():
                buffer.view(-1)[:1] = version % 2
        prepared = store.prepare(version, parameters.take(precision))
        store.publish(prepared)
        verify(store.content, prepared)
        shards.append((bytes(store.content), bool(prepared.deltas)))
    return shards


def on_rank(ranks, make, precision):
    model = make()
    place_model(model, ranks, Precision.FLOAT32)
    state = PublishedState(model)
    state.take(precision)
    starts = state.first_rows
    assert starts.keys() == own_rows(model).keys()
    rows = {name: each.shape for name, each in own_rows(model).items()}
    return starts, rows, publish(model, ranks, precision, starts)


def content(payload):
    """Dtype, row shape and bytes of each tensor."""
    return {
        name: (each.entry.dtype, list(each.entry.shape), payload[each.begin : each.end])
        for name, each in tensor_sections(payload).items()
    }


def together(shards, starts):
    """The whole tensors of several payloads, each tensor's rows in the order of their numbers."""
    parts = {}
    for payload, begins in zip(shards, starts, strict=True):
        for name, (dtype, shape, data) in content(payload).items():
            parts.setdefault(name, []).append((begins[name], dtype, shape, data))
    found = {}
    for name, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0])
        num_rows = 0
        for begin, _, shape, _ in pieces:
            assert begin == num_rows
            num_rows += shape[0] if shape else 1
        _, dtype, shape, _ = pieces[0]
        data = b"".join(piece[3] for piece in pieces)
        found[name] = (dtype, [num_rows, *shape[1:]] if shape else [], data)
    return found


@pytest.mark.parametrize(
    ("size", "fsdp_size", "make", "precision"),
    [
        (2, 2, base, Precision.BFLOAT16),
        (5, 5, base, Precision.FLOAT32),  # 16 rows in chunks of 4: the last rank has none of them
        (4, 2, routed, Precision.BFLOAT16),
        (3, 3, with_adapters, Precision.FLOAT32),  # two rows over three ranks
    ],
    ids=["2 ranks", "5 ranks", "2 x 2", "adapters"],
)
def test_the_shards_of_all_ranks_are_the_whole_set_over_several_versions(
    size, fsdp_size, make, precision
):
    found = run_ranks(size, lambda ranks: on_rank(ranks, make, precision), fsdp_size=fsdp_size)
    shards = found[:fsdp_size]
    assert [each[2] for each in found[fsdp_size:]] == [
        each[2] for each in shards[: size - fsdp_size]
    ]
    alone = publish(make(), None, precision, {})
    starts = [each[0] for each in shards]
    for version in range(VERSIONS):
        payloads = [each[2][version][0] for each in shards]
        assert together(payloads, starts) == content(alone[version][0])
    assert len(starts[0]) == len(content(alone[0][0]))
    if size == 5:
        assert "model.norm.weight" not in starts[-1]
    if make is routed:
        assert [("model.layers.1.table" in each) for each in starts] == [True, False]
    if size == 2:
        # Version 2 changes nearly all rows of rank 0 and few of rank 1: each decides for itself.
        is_delta = [[each for _, each in shard[2]] for shard in shards]
        assert is_delta == [[False, True, False, True], [False, True, True, True]]


def test_a_rank_that_holds_whole_tensors_beside_its_rows_publishes_nothing():
    def gathered(ranks):
        model = base()
        place_model(model, ranks, Precision.FLOAT32)
        model.unshard()  # the root's: embedding and norm; the layers stay cut
        with pytest.raises(ValueError, match=r"model.embed_tokens.weight: is not cut"):
            own_rows(model)
        return True

    assert run_ranks(2, gathered) == [True, True]


BFLOAT16, FLOAT32 = Precision.BFLOAT16, Precision.FLOAT32


def load(payload):
    return safetensors.torch.load(bytes(payload))


def test_a_tensor_shared_by_two_modules_is_published_once():
    tensors = load(PublishedState(llama(tied=True)).take(FLOAT32))
    assert EMBEDDING in tensors
    assert HEAD not in tensors


def test_persistent_buffers_are_published_and_keep_their_types():
    model = with_buffers(llama())
    layer = model.model.layers[1]
    found = load(PublishedState(model).take(BFLOAT16))
    buffers = {
        name: each for name, each in found.items() if name not in dict(model.named_parameters())
    }
    expected = {
        f"model.layers.1.{name}": getattr(layer, name) for name in ("bias", "table", "is_set")
    }
    assert buffers.keys() == expected.keys()
    for name, each in expected.items():
        assert (buffers[name].dtype, buffers[name].shape) == (each.dtype, each.shape)
        assert torch.equal(buffers[name], each)


def test_beside_adapters_the_buffers_of_the_base_model_stay_in_its_files():
    model = with_buffers(llama())
    add_adapters(model, Lora(rank=1))
    assert all(".lora_" in name for name in load(PublishedState(model).take(FLOAT32)))


@torch.no_grad()
def test_a_buffer_that_changes_is_a_delta_of_its_own_bits():
    model = with_buffers(llama())
    layer, state = model.model.layers[1], PublishedState(model)
    state.take(BFLOAT16)
    layer.bias[0] += 1e-7  # less than a rounding to bfloat16
    layer.table[1, 0] = 5
    layer.is_set.fill_(False)
    found = {
        name: (each.positions.tolist(), each.bits.dtype.itemsize, each.bits.tolist())
        for name, each in state.take(BFLOAT16).items()
        if each.positions.size
    }
    bits = layer.bias[:1].numpy().view(np.uint32).tolist()
    assert found == {
        "model.layers.1.bias": ([0], 4, bits),
        "model.layers.1.table": ([2], 8, [5]),
        "model.layers.1.is_set": ([0], 1, [0]),
    }


@torch.no_grad()
def test_the_elements_whose_rounded_bits_differ_are_all_that_changes():
    model = llama()
    parameters = PublishedState(model)
    parameters.take(BFLOAT16)
    weight = model.lm_head.weight.view(-1)
    weight[:3] = torch.tensor([1.0, 0.0, 7.0])
    parameters.take(BFLOAT16)  # nobody wrote these into the file, so they differ again
    weight[0] += 1e-6  # less than its rounding
    weight[1] = -0.0
    changes = {name: each for name, each in parameters.take(BFLOAT16).items() if each.bits.size}
    assert list(changes) == [HEAD]
    assert changes[HEAD].positions.tolist() == [0, 1, 2]
    assert changes[HEAD].bits.tolist() == [0x3F80, 0x8000, 0x40E0]


@pytest.mark.parametrize("precision", [BFLOAT16, FLOAT32])
@torch.no_grad()
def test_a_set_that_gets_the_changes_of_each_version_equals_the_parameters(precision):
    torch.manual_seed(0)
    model = llama(tied=True)
    parameters = PublishedState(model)
    published = parameters.take(precision)
    for _ in range(3):
        for each in model.parameters():
            each.add_((torch.rand_like(each) < 0.05) * torch.randn_like(each))
        changes = parameters.take(precision)
        num_changes = sum(change.positions.size for change in changes.values())
        assert 0 < num_changes < 0.1 * sum(each.numel() for each in model.parameters())
        write_changes(elements_of(published), changes)
        assert published == PublishedState(model).whole(precision)


@pytest.mark.parametrize("precision", [BFLOAT16, FLOAT32])
@torch.no_grad()
def test_a_version_in_which_most_elements_differ_is_a_whole_file(precision):
    model = llama()
    parameters = PublishedState(model)
    before = parameters.take(precision)
    for each in model.parameters():
        each.add_(1.0)
    after = parameters.take(precision)
    assert after == PublishedState(model).whole(precision)
    # In bfloat16 others may still read the file before; in float32 that is a copy.
    assert (after is before) is (precision is FLOAT32)
    model.lm_head.weight[0, 0] = 5.0
    assert parameters.take(precision)[HEAD].positions.tolist() == [0]


@torch.no_grad()
def test_another_number_format_is_a_new_file():
    model = llama()
    parameters = PublishedState(model)
    parameters.take(FLOAT32)
    assert load(parameters.take(BFLOAT16))[HEAD].dtype is torch.bfloat16
    assert all(not each.positions.size for each in parameters.take(BFLOAT16).values())


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", torch.int16), ("float32", torch.int32)])
def test_the_search_on_a_device_finds_what_the_one_in_tiles_finds(monkeypatch, dtype, bits):
    monkeypatch.setattr("vcpo_learner.model.published_state._TILE", 7)
    torch.manual_seed(0)
    before = torch.randn(50)
    now = torch.where(torch.rand(50) < 0.3, -before, before)
    was = before.to(getattr(torch, dtype)).view(bits)
    in_tiles = changes_on_cpu(now, was, getattr(torch, dtype))
    copy = was.clone()
    on_device = changes_on_device(now, copy, getattr(torch, dtype))
    assert in_tiles.positions.tolist() == (now != before).nonzero().flatten().tolist()
    assert on_device.positions.tolist() == in_tiles.positions.tolist()
    assert on_device.bits.tolist() == in_tiles.bits.tolist()
    assert torch.equal(copy, now.to(getattr(torch, dtype)).view(bits))
