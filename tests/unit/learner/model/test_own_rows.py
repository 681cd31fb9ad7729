"""Versions in shards: what each rank publishes, and all of them together, bit for bit."""

import pytest
import torch

from tests.fixtures.learner.models import llama, with_buffers
from tests.fixtures.learner.ranks import run_ranks
from tests.fixtures.weight_changes import store_in_process
from vcpo.api.workloads import Lora, Precision
from vcpo.wire.weights import tensor_sections, verify
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.model.published_state import PublishedState, own_rows
from vcpo_learner.policy_state import persistent_buffers
from vcpo_learner.ranks.sharding import local_part, place_model

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
        verify(store.content, prepared.manifest)
        shards.append((bytes(store.content), bool(prepared.manifest.deltas)))
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
