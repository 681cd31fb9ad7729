from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.fixtures.learner.models import (
    EVERY_FAMILY,
    FAMILIES,
    PAD,
    llama,
    own_logprobs,
    sampled_groups,
    seeded_model,
)
from tests.fixtures.learner.updates import (
    expected_gradient,
    gradient_of_step,
    make_spec,
    spec_of,
    with_micro_batches,
)
from vcpo.algo.health.fresh_tokens import gap_of
from vcpo.api.algorithm import RowLayout
from vcpo.api.learner import Attention
from vcpo.service.lifecycle import StartError
from vcpo.wire.trajectory import VersionSpan
from vcpo_learner.forward.attention import select_attention
from vcpo_learner.forward.kept_apart import require_kept_apart
from vcpo_learner.forward.logprobs import (
    prefix_states,
    token_entropies,
    token_logprobs,
)
from vcpo_learner.forward.packed_rows import pack_row
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.token_batch import token_batch
from vcpo_learner.update.policy_update import PolicyUpdate

CPU = torch.device("cpu")
TOKEN_METHODS = ["vtrace", "stapo", "tba", "gspo"]
"""One that reads hidden states, one entropies, one a reference policy, and one that reads none."""


def packing_spec(spec, micro_batch=64):
    batch = spec.batch.model_copy(update={"row_layout": RowLayout.PACKED})
    return with_micro_batches(spec.model_copy(update={"batch": batch}), micro_batch)


def assert_same(gradient, expected):
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9 * float(expected.norm()))


def test_one_row_holds_the_trajectories_in_their_order():
    rows = pack_row([1, 3, 2], CPU)
    assert rows.segments.tolist() == [[0, 1, 1, 1, 2, 2]]
    assert rows.position_ids.tolist() == [[0, 0, 1, 2, 0, 1]]
    assert rows.places.tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 0]]
    assert rows.is_own.int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0]]
    assert rows.arguments["cu_seq_lens_q"].tolist() == [0, 1, 4, 6]
    assert rows.arguments["cu_seq_lens_q"].dtype is torch.int32
    assert rows.arguments["max_length_q"] == 3
    named = torch.arange(9).view(3, 3)
    assert rows.pack(named).tolist() == [[0, 3, 4, 5, 6, 7]]
    assert rows.unpack(rows.pack(named)).tolist() == [[0, 0, 0], [3, 4, 5], [6, 7, 0]]


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_packing_does_not_change_what_is_said_of_a_token(family):
    model = seeded_model(EVERY_FAMILY[family], dtype=torch.float64)
    trajectories = [one for group in sampled_groups(model) for one in group]
    padded, packed = (token_batch(trajectories, PAD, CPU, packs=flag) for flag in (False, True))
    assert packed.row is not None
    found = packed.select_trained(token_logprobs(model, packed, temperature=0.7))
    alone = torch.cat([own_logprobs(model, one, temperature=0.7) for one in trajectories])
    assert found.tolist() == pytest.approx(alone.tolist(), rel=1e-9)
    entropies = [token_entropies(model, batch, temperature=0.7) for batch in (padded, packed)]
    torch.testing.assert_close(*entropies)
    states = [prefix_states(model, batch)[padded.response_mask] for batch in (padded, packed)]
    torch.testing.assert_close(*states)


@pytest.mark.parametrize("micro_batch", [64, 5], ids=["one micro-batch", "three micro-batches"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_on_packed_rows_has_the_gradient_written_out_by_hand(family, micro_batch):
    model = seeded_model(FAMILIES[family], dtype=torch.float64)
    groups = sampled_groups(model)
    expected = expected_gradient(model, groups, "opob")
    assert_same(gradient_of_step(model, packing_spec(make_spec(), micro_batch), groups), expected)


@pytest.mark.parametrize("method", TOKEN_METHODS)
def test_methods_that_read_tokens_see_the_same(method):
    groups = sampled_groups(seeded_model(llama, dtype=torch.float64))
    padded, packed = (
        PolicyUpdate(seeded_model(llama, dtype=torch.float64), each, PAD).step(
            groups, policy_version=9
        )
        for each in (spec_of(method), packing_spec(spec_of(method)))
    )
    assert packed.gradient_norm == pytest.approx(padded.gradient_norm, rel=1e-6)
    assert packed.ess_ratio == pytest.approx(padded.ess_ratio, rel=1e-6)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_models_of_every_family_keep_the_trajectories_of_a_row_apart(family):
    model = seeded_model(EVERY_FAMILY[family])
    select_attention(model, Attention.AUTO, packs=True)
    require_kept_apart(PolicyNetwork(model), packs=True)


class Leaking(nn.Module):
    """Sums up all tokens before; or only those of its segment, one position too far."""

    def __init__(self, *, forgets_positions):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.forgets_positions = forgets_positions

    def forward(self, input_ids, position_ids, **_):
        if self.forgets_positions:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
            return SimpleNamespace(logits=self.logits(position_ids))
        weighed = input_ids * torch.arange(1, input_ids.shape[1] + 1)
        return SimpleNamespace(logits=self.logits(weighed.cumsum(1)))

    def logits(self, numbers):
        return self.weight * numbers[:, :, None] * torch.linspace(0.0, 0.1, 5)


@pytest.mark.parametrize("forgets_positions", [True, False])
def test_a_model_that_does_not_is_refused_with_the_field_and_the_cure(forgets_positions):
    message = r"spec.batch.rowLayout: .*Leaking (lets|gives) .* use padded"
    with pytest.raises(StartError, match=message):
        require_kept_apart(PolicyNetwork(Leaking(forgets_positions=forgets_positions)), packs=True)


def test_fresh_tokens_of_packed_rows_are_those_of_padded_ones():
    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model)
    newest = [one for group in groups for one in group if len(one.response_token_ids) > 1]
    mixed = [
        replace(
            one,
            version_spans=(
                VersionSpan(policy_version=8, num_tokens=1),
                VersionSpan(policy_version=9, num_tokens=len(one.response_token_ids) - 1),
            ),
        )
        for one in newest
    ]
    found = []
    for spec in (make_spec(), packing_spec(make_spec())):
        update = PolicyUpdate(seeded_model(llama, dtype=torch.float64), spec, PAD)
        update.begin(groups, policy_version=9)
        found.append(update.finish(mixed).fresh)
    padded, packed = found
    sizes = [[block.num_tokens for block in each] for each in found]
    assert sizes[0] == sizes[1] == [one.num_fresh_tokens(9) for one in mixed]
    assert gap_of(packed).value == pytest.approx(gap_of(padded).value, rel=1e-9)
