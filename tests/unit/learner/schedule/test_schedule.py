"""The tokens that a GPU's memory holds."""

from collections import Counter
from dataclasses import replace
from itertools import chain, combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.fixtures.learner.updates import make_spec
from vcpo.api.learner import ActivationCheckpointing, Attention
from vcpo.service.lifecycle import StartError
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.forward.attention import select_attention
from vcpo_learner.forward.fused_layers import fuse_layers
from vcpo_learner.schedule import token_budget
from vcpo_learner.schedule.micro_steps import MicroBatchBudget, fit, group_micro_steps, micro_steps
from vcpo_learner.schedule.token_budget import (
    MemoryUse,
    ModelSize,
    check_room,
    group_bytes,
    layer_bytes,
    memory_budget,
    planned,
    state_bytes,
    token_bytes,
)

GIB = 1 << 30
SEVEN_BILLION = ModelSize(
    num_parameters=7_600_000_000,
    num_trained=7_600_000_000,
    num_layers=28,
    hidden=3584,
    inner=18_944,
    vocabulary=152_064,
)
HALF = MemoryUse(activation_bytes=2, checkpoints_layers=True, num_shards=8)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 16}),
    "qwen3_5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        {"layer_types": ["linear_attention"], "linear_num_value_heads": 8, "head_dim": 16}
        | {"linear_num_key_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    ),
    "falcon_h1": (
        FalconH1ForCausalLM,
        FalconH1Config,
        {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_ssm": 256}
        | {"mamba_chunk_size": 64},
    ),
}


def build(family, num_layers):
    make, config, fields = FAMILIES[family]
    fields = {
        key: each * num_layers if key == "layer_types" else each for key, each in fields.items()
    }
    model = make(config(**{**SMALL, **fields, "num_hidden_layers": num_layers})).eval()
    select_attention(model, Attention.VARLEN, packs=False)
    return model


def saved_bytes(model, num_tokens, *, half):
    """Bytes that autograd keeps of a forward pass, parameters left out."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.ones(1, num_tokens, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=half),
    ):
        model.model(input_ids=tokens, use_cache=False)
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    return sum(each.untyped_storage().nbytes() for at, each in kept.items() if at not in own)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("is_fused", [False, True], ids=["own code", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_at_most_what_is_counted_and_more_than_half_of_it(family, is_fused, half):
    few, many = (build(family, num_layers) for num_layers in (1, 3))
    if is_fused:
        for model in (few, many):
            fuse_layers(model, is_half=False)
    measured = [
        saved_bytes(model, 256, half=half) - saved_bytes(model, 128, half=half)
        for model in (few, many)
    ]
    of_layer = (measured[1] - measured[0]) / 2 / 128
    counted = layer_bytes(ModelSize.of(few), 2 if half else 4)
    assert of_layer <= counted < 2 * of_layer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_with_checkpoints_keeps_its_input_only(family):
    models = [build(family, num_layers) for num_layers in (1, 3)]
    for model in models:
        set_checkpoints(model, ActivationCheckpointing.LAYERS)
    few, many = (
        saved_bytes(model, 256, half=True) - saved_bytes(model, 128, half=True) for model in models
    )
    assert (many - few) / 2 / 128 == 4 * SMALL["hidden_size"]


def test_a_gpu_without_room_for_what_every_step_needs_is_named_with_the_cure():
    # By hand: 3.09 B x (4 + 8 + 2) bytes are 43.3 GB, 40.3 GiB; six tenths of a card of 80 GB
    # leave 35.4 beside the parameters. Muon has 4 bytes less; adapters next to nothing.
    three = replace(
        SEVEN_BILLION, num_parameters=3_090_000_000, num_trained=3_090_000_000, num_layers=36
    )
    alone = replace(HALF, num_shards=1, published_bytes=2)
    free = int(35.4 * GIB)
    with pytest.raises(
        StartError, match=r"3\.09 billion.* 40\.3 GiB .*leave 35\.4 GiB.*lora.*more"
    ):
        check_room(free, three, alone)
    check_room(free, three, replace(alone, least_moment_bytes=4))
    check_room(free, replace(three, num_trained=10_000_000), alone)
    check_room(free, three, replace(alone, num_shards=2))
    with pytest.raises(StartError, match=r" 51\.8 GiB "):
        check_room(41 * GIB, three, replace(alone, has_reference=True))


ONE_AND_A_HALF = ModelSize(
    num_parameters=1_544_000_000,
    num_trained=1_544_000_000,
    num_layers=28,
    hidden=1536,
    inner=8960,
    vocabulary=151_936,
)
ALONE = replace(HALF, num_shards=1, published_bytes=2, is_one_group=True)


@pytest.mark.parametrize(
    ("free_gib", "setting", "longest", "found"),
    [
        (133, "auto", 2048, "none"),  # an H200
        (133, "auto", 32_768, "layers"),
        (41, "auto", 2048, "layers"),  # six tenths of a card of 80 GB
        (133, "layers", 2048, "layers"),
        (41, "none", 2048, "none"),
    ],
)
def test_activations_are_kept_where_memory_holds_many_tokens_of_them(
    free_gib, setting, longest, found
):
    setting = ActivationCheckpointing(setting)
    budget = planned(free_gib * GIB, ONE_AND_A_HALF, ALONE, setting, longest)
    assert budget.activations == found
    use = replace(ALONE, checkpoints_layers=found == "layers")
    assert budget == memory_budget(free_gib * GIB, ONE_AND_A_HALF, use)


def test_one_baseline_for_the_batch_leaves_the_sums_of_more_groups_to_tokens():
    one, more = (
        memory_budget(41 * GIB, ONE_AND_A_HALF, replace(ALONE, is_one_group=each))
        for each in (True, False)
    )
    assert one.groups == 1
    assert one.tokens == pytest.approx(more.tokens / 0.75, rel=0.01)


def test_without_norms_there_are_no_sums_and_with_checkpoints_no_copies_of_all_layers():
    plain = replace(ALONE, measures_norms=False)
    both = [state_bytes(ONE_AND_A_HALF, each) for each in (ALONE, plain)]
    assert both[0] - both[1] == 4 * ONE_AND_A_HALF.num_trained
    assert token_bytes(ONE_AND_A_HALF, plain) < token_bytes(ONE_AND_A_HALF, ALONE)
    kept = replace(ALONE, checkpoints_layers=False)
    ends = 2 * 151_936 * 1536
    assert state_bytes(ONE_AND_A_HALF, kept) - both[0] == 2 * (
        ONE_AND_A_HALF.num_trained - ends - 2 * (ONE_AND_A_HALF.num_trained - ends) // 28
    )


def test_a_rank_with_room_refuses_with_the_one_that_has_none(monkeypatch):
    # One alone would refuse while the others wait for its answer.
    monkeypatch.setattr(token_budget, "free_bytes", lambda _: 64 * GIB)
    ranks = SimpleNamespace(
        device=torch.device("cuda", 0), num_shards=2, least=lambda value: min(value, 8)
    )
    with pytest.raises(StartError, match=r"leave 0\.0 GiB"):
        token_budget.budget_on_ranks(
            build(next(iter(FAMILIES)), 1), make_spec(), ranks, measures_norms=True
        )


def test_each_open_group_has_the_sum_of_a_matrix_whole_and_that_of_all_in_shards():
    # By hand: 4 bytes for each of .95 B numbers of a shard; for (152,064 + 18,944) x 3,584 numbers
    # of the head and of a layer's matrix, and an eighth of that, which a rank has of their sums.
    assert group_bytes(SEVEN_BILLION, HALF) == 3_800_000_000 + 2_451_570_688 + 306_446_336


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 36))
def test_the_budget_fits_and_grows_with_the_memory(free_bytes, more_bytes):
    less, more = (
        memory_budget(each, SEVEN_BILLION, HALF) for each in (free_bytes, free_bytes + more_bytes)
    )
    assert 1 <= less.tokens <= more.tokens
    assert 1 <= less.groups <= more.groups
    if less.tokens > 1:
        sums = (less.groups - 1) * group_bytes(SEVEN_BILLION, HALF)
        needed = state_bytes(SEVEN_BILLION, HALF) + sums
        assert needed + less.tokens * token_bytes(SEVEN_BILLION, HALF) <= free_bytes


def test_sizes_are_read_from_any_family():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2))
    size = ModelSize.of(torch.nn.Sequential(gpt2))
    assert (size.num_layers, size.hidden, size.inner, size.vocabulary) == (2, 16, 64, 32)
    assert size.num_parameters == sum(each.numel() for each in gpt2.parameters())
    mixture = Qwen3MoeConfig(
        **SMALL, head_dim=32, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=100
    )
    found = ModelSize.of(Qwen3MoeForCausalLM(mixture))
    assert (found.inner, found.hidden) == (300, 128)


def test_only_trained_parameters_have_a_state():
    model = build("llama", 1)
    model.model.requires_grad_(False)
    size = ModelSize.of(model)
    assert size.num_trained == model.lm_head.weight.numel() < size.num_parameters


LENGTHS = st.lists(st.integers(1, 50), max_size=30)
GROUPS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=9), min_size=1, max_size=12)
BUDGETS = st.builds(
    MicroBatchBudget,
    trajectories=st.integers(1, 9),
    tokens=st.none() | st.integers(1, 200),
    groups=st.none() | st.integers(1, 3),
    counts_padding=st.booleans(),
)
RANKS = st.integers(1, 5)
UNLIMITED = MicroBatchBudget(trajectories=10**6)


def computed_tokens(lengths, budget):
    """What a forward pass computes: a rectangle as long as the longest, or just the tokens."""
    if not lengths:
        return 0
    return len(lengths) * max(lengths) if budget.counts_padding else sum(lengths)


def is_within(lengths, budget):
    tokens = budget.tokens or 10**9
    return len(lengths) <= 1 or (
        len(lengths) <= budget.trajectories and computed_tokens(lengths, budget) <= tokens
    )


def partitions(numbers, most):
    """Every way to put numbers into at most so many parts."""
    if not numbers:
        yield []
        return
    *rest, last = numbers
    for parts in partitions(rest, most):
        for index in range(len(parts)):
            yield [[*part, last] if at == index else part for at, part in enumerate(parts)]
        if len(parts) < most:
            yield [*parts, [last]]


def cuts(count):
    """Every way to cut so many in a row into runs, as lists of indices."""
    for ends in chain.from_iterable(combinations(range(1, count), at) for at in range(count)):
        yield [list(range(*each)) for each in pairwise([0, *ends, count])]


@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=7),
    st.integers(1, 7),
    st.none() | st.integers(1, 9000),
)
def test_one_rank_computes_least_for_padding_and_micro_steps_together(lengths, most, tokens):
    budget = MicroBatchBudget(trajectories=most, tokens=tokens)

    def cost(parts):
        return sum(computed_tokens(part, budget) + 1500 for part in parts)

    steps = micro_steps(lengths, 1, budget)
    found = cost([lengths[at] for at in only] for (only,) in steps)
    in_order = sorted(lengths)
    others = ([[in_order[at] for at in run] for run in runs] for runs in cuts(len(lengths)))
    assert found == min(
        cost(parts) for parts in others if all(is_within(part, budget) for part in parts)
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_long_trajectory_does_not_widen_short_ones(num_ranks):
    lengths = [100] * 20 + [4000] * num_ranks
    steps = micro_steps(lengths, num_ranks, MicroBatchBudget(trajectories=64, tokens=10**5))
    assert [max(map(len, step)) for step in steps] == [20 // num_ranks, 1]
    packed = MicroBatchBudget(trajectories=64, tokens=10**5, counts_padding=False)
    assert len(micro_steps(lengths, num_ranks, packed)) == 1


@given(LENGTHS, RANKS, BUDGETS)
def test_every_trajectory_is_in_one_micro_batch_within_the_budget(lengths, num_ranks, budget):
    steps = micro_steps(lengths, num_ranks, budget)
    assert all(len(step) == num_ranks for step in steps)
    parts = list(chain.from_iterable(steps))
    assert sorted(chain.from_iterable(parts)) == list(range(len(lengths)))
    assert all(is_within([lengths[at] for at in part], budget) for part in parts)
    assert all(any(step) for step in steps)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.integers(2, 3),
    st.integers(1, 6),
    st.integers(1, 60),
)
def test_no_split_into_as_many_micro_batches_has_a_smaller_largest_one(
    lengths, num_ranks, trajectories, tokens
):
    budget = MicroBatchBudget(trajectories=trajectories, tokens=tokens)
    steps = micro_steps(lengths, num_ranks, budget)
    parts = [[lengths[at] for at in part] for part in chain.from_iterable(steps)]
    found = max(computed_tokens(part, budget) for part in parts)
    for other in partitions(lengths, len(parts)):
        if all(is_within(part, budget) for part in other):
            assert found <= max(computed_tokens(part, budget) for part in other)


@given(GROUPS, st.integers(1, 3), st.integers(1, 4), BUDGETS)
def test_every_trajectory_of_a_group_is_in_one_shard_of_one_replica(
    groups, num_replicas, num_shards, budget
):
    found = Counter()
    replicas_of_group = [set() for _ in groups]
    for replica, steps in enumerate(group_micro_steps(groups, num_replicas, num_shards, budget)):
        for step in steps:
            for members in step.shards:
                assert list(map(sorted, members)) == list(map(list, members))
                for number, chosen in zip(step.groups, members, strict=True):
                    replicas_of_group[number].add(replica)
                    found.update((number, at) for at in chosen)
    expected = [(number, at) for number, group in enumerate(groups) for at in range(len(group))]
    assert found == Counter(expected)
    assert all(len(replicas) == 1 for replicas in replicas_of_group)


@given(GROUPS, st.integers(1, 3), st.integers(1, 4), BUDGETS)
def test_all_ranks_have_as_many_micro_steps_each_within_the_budget(
    groups, num_replicas, num_shards, budget
):
    replicas = group_micro_steps(groups, num_replicas, num_shards, budget)
    assert len(replicas) == num_replicas
    assert len({len(steps) for steps in replicas}) == 1
    for step in chain.from_iterable(replicas):
        assert len(step.shards) == num_shards
        assert budget.groups is None or len(step.groups) <= budget.groups
        for members in step.shards:
            rows = zip(step.groups, members, strict=True)
            assert is_within([groups[number][at] for number, own in rows for at in own], budget)


@given(GROUPS, st.integers(1, 3), st.integers(1, 4), BUDGETS)
def test_a_group_that_fits_is_whole_and_another_is_alone_until_it_is_complete(
    groups, num_replicas, num_shards, budget
):
    for steps in group_micro_steps(groups, num_replicas, num_shards, budget):
        open_group = None
        for step in steps:
            if open_group is not None:
                assert step.groups == (open_group,)
            if not step.is_last or open_group is not None:
                (only,) = step.groups
                assert not fit([groups[only]], num_shards, budget)
                open_group = None if step.is_last else only
                continue
            for slot, number in enumerate(step.groups):
                own = chain.from_iterable(members[slot] for members in step.shards)
                assert sorted(own) == list(range(len(groups[number])))
        assert open_group is None


@given(GROUPS, st.integers(1, 12))
def test_one_rank_takes_whole_groups_shortest_first_while_they_fit(groups, trajectories):
    groups = [group[:trajectories] for group in groups]
    (steps,) = group_micro_steps(groups, 1, 1, MicroBatchBudget(trajectories=trajectories))
    assert all(step.is_last for step in steps)
    order = [number for step in steps for number in step.groups]
    assert order == sorted(range(len(groups)), key=lambda number: max(groups[number]))
    for step in steps:
        assert step.shards == (tuple(tuple(range(len(groups[at]))) for at in step.groups),)
    for step, following in pairwise(steps):
        count = sum(len(groups[number]) for number in step.groups)
        assert count + len(groups[following.groups[0]]) > trajectories
