"""A model without parameters, and the slices that each rank reads."""

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import YoutuConfig, YoutuForCausalLM

from tests.fixtures.learner.models import llama
from tests.fixtures.learner.ranks import run_ranks
from tests.fixtures.vocabularies import tokenizer_of
from vcpo.api.workloads import Model, Precision
from vcpo.service.vocabulary import num_tokens
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.model.loading import load_policy
from vcpo_learner.model.skeleton import (
    build_skeleton,
    fill_skeleton,
    holds_parameters,
    load_on_ranks,
)
from vcpo_learner.ranks import sharding
from vcpo_learner.ranks.ranks import Ranks

TINY = "examples/models/tiny"
CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model_files(request, tmp_path):
    """A model's folder in several files, in bfloat16 as models are published."""
    torch.manual_seed(0)
    llama(tied=request.param).bfloat16().save_pretrained(tmp_path, max_shard_size="3KB")
    tokenizer_of(range(20)).save_pretrained(tmp_path)
    return tmp_path


def test_a_skeleton_takes_no_memory_and_knows_its_rotary_frequencies():
    skeleton = build_skeleton(TINY, None)
    loaded, _ = load_policy(TINY, None)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    expected = dict(loaded.named_buffers())
    assert expected
    for name, buffer in skeleton.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert skeleton.generation_config.eos_token_id == loaded.generation_config.eos_token_id


def test_a_filled_skeleton_computes_what_the_loaded_model_computes(model_files):
    loaded = type(llama()).from_pretrained(model_files, dtype=torch.float32)
    skeleton = build_skeleton(str(model_files), None)
    assert holds_parameters(model_files, skeleton)
    fill_skeleton(PolicyNetwork(skeleton), model_files, CPU)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(skeleton(tokens).logits, loaded(tokens).logits)
    assert all(each.dtype is torch.float32 for each in skeleton.parameters())


def test_each_rank_reads_its_own_slices(model_files):
    expected = dict(
        type(llama()).from_pretrained(model_files, dtype=torch.float32).named_parameters()
    )

    def filled(ranks):
        settings = Model(name=str(model_files))
        network, tokenizer = load_on_ranks(settings, ranks, Precision.FLOAT32)
        skeleton = network.model
        assert len(tokenizer) == num_tokens(skeleton) == 20
        assert all(isinstance(each, DTensor) for each in skeleton.parameters())
        held = sum(each.to_local().numel() for each in skeleton.parameters())
        assert not any(buffer.is_meta for buffer in skeleton.buffers())
        whole = {name: each.full_tensor() for name, each in skeleton.named_parameters()}
        network.compare_head()  # FSDP took the shards in
        return held, {name: each.detach() for name, each in whole.items()}

    found = run_ranks(2, filled)
    for held, whole in found:
        assert held < 0.6 * sum(each.numel() for each in expected.values())
        assert whole.keys() == expected.keys()
        for name, each in whole.items():
            assert torch.equal(each, expected[name]), name


def test_each_rank_reads_its_own_slices_of_a_base_and_all_draw_the_same_adapters(model_files):
    expected = dict(
        type(llama()).from_pretrained(model_files, dtype=torch.float32).named_parameters()
    )
    settings = Model.model_validate({"name": str(model_files), "lora": {"rank": 2}})

    def loaded(ranks):
        torch.manual_seed(3)
        network, _ = load_on_ranks(settings, ranks, Precision.FLOAT32)
        named = dict(network.model.named_parameters())
        held = sum(each.numel() for each in map(sharding.local_part, named.values()))
        return held, {name: sharding.whole(each).detach() for name, each in named.items()}

    _, alone = loaded(Ranks(device=CPU))
    base = {name: each for name, each in alone.items() if ".lora_" not in name}
    assert {name.replace(".base_layer.", ".") for name in base} == expected.keys()
    for name, each in base.items():
        assert torch.equal(each, expected[name.replace(".base_layer.", ".")]), name
    for name in alone.keys() - base.keys():
        is_random = name.endswith("lora_A.default.weight")
        assert alone[name].count_nonzero() == is_random * alone[name].numel(), name
    for held, found in run_ranks(2, loaded):
        assert held < 0.6 * sum(each.numel() for each in alone.values())
        assert found.keys() == alone.keys()
        for name, each in found.items():
            assert torch.equal(each, alone[name]), name


def test_of_a_base_in_bfloat16_no_copy_in_float32_is_made(model_files, monkeypatch):
    # It would load all in float32.
    monkeypatch.setattr(f"{load_on_ranks.__module__}.load_policy", None)
    numbers = Counter()
    original = torch.empty_like

    def empty_like(tensor, **options):
        numbers[tensor.dtype] += tensor.numel()
        return original(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    settings = Model.model_validate({"name": str(model_files), "lora": {"rank": 2}})
    network, _ = load_on_ranks(settings, Ranks(device=CPU), Precision.BFLOAT16)
    adapters = sum(each.numel() for each in network.parameters() if each.requires_grad)
    assert numbers[torch.float32] == adapters


def test_one_rank_has_every_number_of_the_files_in_the_padding_row_too(tmp_path):
    heads = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    config = YoutuConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, pad_token_id=3,
        num_attention_heads=2, num_key_value_heads=2, v_head_dim=8, **heads,
    )  # fmt: skip
    model = YoutuForCausalLM(config)
    expected = torch.rand(20, 16)
    model.model.embed_tokens.weight.data.copy_(expected)
    model.save_pretrained(tmp_path)
    tokenizer_of(range(20)).save_pretrained(tmp_path)
    network, _ = load_on_ranks(Model(name=str(tmp_path)), Ranks(device=CPU), Precision.FLOAT32)
    assert torch.equal(network.model.get_input_embeddings().weight, expected)


def test_a_model_whose_files_have_other_names_is_loaded_whole(tmp_path):
    # As an old file of a model without its head: transformers adds the prefix.
    model = llama(tied=True)
    model.save_pretrained(tmp_path, state_dict=model.model.state_dict())
    tokenizer_of(range(20)).save_pretrained(tmp_path)
    expected = {name: each.detach() for name, each in model.named_parameters()}

    def loaded(ranks):
        assert not holds_parameters(tmp_path, build_skeleton(str(tmp_path), None))
        network, _ = load_on_ranks(Model(name=str(tmp_path)), ranks, Precision.FLOAT32)
        model = network.model
        assert num_tokens(model) == 20
        return {name: each.full_tensor().detach() for name, each in model.named_parameters()}

    for whole in run_ranks(2, loaded):
        for name, each in whole.items():
            assert torch.equal(each, expected[name]), name
