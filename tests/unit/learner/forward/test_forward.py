import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.fixtures.families import ATTENTION, HYBRIDS, family
from tests.fixtures.learner.models import (
    EVERY_FAMILY,
    FAMILIES,
    PAD,
    llama,
    own_logprobs,
    sampled_groups,
    seeded_model,
    trajectory,
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
from vcpo.service.rotary_table import fix_rotary_table
from vcpo.wire.trajectory import TokenSpan, VersionSpan
from vcpo_learner.forward.attention import select_attention
from vcpo_learner.forward.forward_pass import (
    prefix_states,
    token_entropies,
    token_logprobs,
    weighted_logprobs,
)
from vcpo_learner.forward.kept_apart import require_kept_apart
from vcpo_learner.forward.packed_rows import pack_row
from vcpo_learner.forward.policy_network import PolicyNetwork, Wanted
from vcpo_learner.forward.token_batch import batch_tokens, token_batch
from vcpo_learner.update.policy_update import PolicyUpdate

CPU = torch.device("cpu")
SHORT = trajectory(0, prompt=(3,), response=(5,))
LONG = trajectory(1, prompt=(3, 4), response=(5, 6))


def test_prompt_and_response_stand_side_by_side_and_padding_right_of_them():
    batch = token_batch([SHORT, LONG], 9, CPU)
    assert batch.input_ids.tolist() == [[3, 5, 9, 9], [3, 4, 5, 6]]


def test_padding_is_not_attended_to():
    batch = token_batch([SHORT, LONG], 9, CPU)
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_only_response_tokens_are_trained_on():
    batch = token_batch([SHORT, LONG], 9, CPU)
    assert batch.response_mask.int().tolist() == [[0, 1, 0, 0], [0, 0, 1, 1]]


def test_tokens_that_the_environment_wrote_are_read_and_not_trained_on():
    sampled = trajectory(2, prompt=(3,), response=(5, 8, 9, 6), logprobs=(-1.0, -2.0))
    one = replace(sampled, inserted_spans=(TokenSpan(start=1, num_tokens=2),))
    batch = token_batch([one], 0, CPU)
    assert batch.input_ids.tolist() == [[3, 5, 8, 9, 6]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1]]
    assert batch.response_mask.int().tolist() == [[0, 1, 0, 0, 1]]
    assert batch.place_trained(torch.tensor([-1.0, -2.0])).tolist() == [[0.0, -1.0, 0.0, 0.0, -2.0]]
    assert batch.select_trained(batch.input_ids).tolist() == [5, 6]


def test_a_trajectory_without_prompt_is_named():
    with pytest.raises(ValueError, match="prompt_token_ids of trajectory 'lease/7' is empty"):
        token_batch([trajectory(7, prompt=())], 0, CPU)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="trajectories is empty"):
        token_batch([], 0, CPU)


class Unigram(nn.Module):
    """Gives every position the same logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def test_logprobs_are_of_the_softmax_at_the_temperature():
    # Logits log 1 and log 4 at temperature 2: odds 1 to 2.
    model = Unigram(torch.tensor([1.0, 4.0]).log().double())
    batch = token_batch([trajectory(0, prompt=(0,), response=(1, 0))], 0, CPU)
    logprobs = token_logprobs(model, batch, temperature=2.0)
    expected = torch.tensor([[0.0, 2 / 3, 1 / 3]]).double()
    torch.testing.assert_close(logprobs[:, 1:].exp(), expected[:, 1:])


def test_logprobs_are_zero_outside_the_response():
    model = Unigram(torch.zeros(9))
    short, long = trajectory(0, response=(5,)), trajectory(1, response=(5, 6, 7))
    batch = token_batch([short, long], PAD, CPU)
    logprobs = token_logprobs(model, batch, temperature=1.0)
    assert torch.equal(logprobs != 0.0, batch.response_mask)


def test_bfloat16_logits_are_normalized_in_float32():
    model = Unigram(torch.randn(50, generator=torch.manual_seed(0)).bfloat16())
    batch = token_batch([trajectory(0, prompt=(1,), response=(2,))], PAD, CPU)
    row = batch.select_trained(token_logprobs(model, batch, temperature=1.0)).tolist()
    logits = model.logits.detach().double()
    assert row[0] == pytest.approx(float(logits[2] - logits.logsumexp(0)), rel=1e-6)


def test_a_token_of_weight_zero_takes_no_part_even_when_it_is_impossible():
    logprobs = torch.tensor([[-1.0, -math.inf]], requires_grad=True)
    weighted_logprobs(logprobs, torch.tensor([[2.0, 0.0]])).sum().backward()
    assert logprobs.grad.tolist() == [[2.0, 0.0]]


def test_weights_are_held_constant():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    weighted_logprobs(logprobs, logprobs.square()).sum().backward()
    assert logprobs.grad.tolist() == [[1.0, 4.0]]


def test_entropies_are_of_the_distribution_that_a_token_was_drawn_against():
    # Probabilities 1/4 and 3/4: H = ln 4 - 3/4 ln 3.
    model = Unigram(torch.tensor([1.0, 3.0]).log())
    batch = token_batch([trajectory(0, response=(1, 0))], 0, CPU)
    row = batch.select_trained(token_entropies(model, batch, temperature=1.0)).tolist()
    assert row == pytest.approx([math.log(4) - 0.75 * math.log(3)] * 2)


def test_the_state_before_a_token_is_that_of_the_token_before_it():
    model = seeded_model(llama, dtype=torch.float64)
    one = trajectory(0, prompt=(3, 4), response=(5, 6))
    batch = token_batch([one], PAD, CPU)
    states = prefix_states(model, batch)
    hidden = model(torch.tensor([[3, 4, 5, 6]]), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(states[0, 2:], hidden[0, 1:3])


LENGTHS = st.lists(st.integers(1, 36), min_size=1, max_size=4)
"""Of responses; windows and chunks end at 8 tokens, and LongRoPE's short factors at 24."""


NO_PACKING = {"gpt-oss", "bloom", "llama4"}
"""Families that `select_attention` does not pack."""


def network_of(kind):
    model = family(kind)
    fix_rotary_table(model)
    return PolicyNetwork(model)


@pytest.fixture(scope="module", params=ATTENTION | HYBRIDS)
def network(request):
    return network_of(request.param)


@pytest.fixture(scope="module", params=sorted((ATTENTION | HYBRIDS).keys() - NO_PACKING))
def packable(request):
    model = family(request.param)
    fix_rotary_table(model)
    assert select_attention(model, Attention.AUTO, packs=True)
    return PolicyNetwork(model)


def scores(network, rows, *, packs):
    tokens = batch_tokens(rows, CPU)
    batch = tokens.micro_batch(range(len(rows)), 0, packs=packs)
    with torch.no_grad():
        logprobs = network.score(batch, Wanted()).logprobs
    return torch.split(logprobs, [len(each.response_token_ids) for each in rows])


def responses(lengths):
    return [
        trajectory(number, response=tuple(2 + (7 * at + 5 * number) % 90 for at in range(length)))
        for number, length in enumerate(lengths)
    ]


def assert_as_alone(network, lengths, *, packs):
    rows = responses(lengths)
    together = scores(network, rows, packs=packs)
    for row, found in zip(rows, together, strict=True):
        (alone,) = scores(network, [row], packs=False)
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@settings(max_examples=3)
@given(lengths=LENGTHS)
def test_a_trajectory_has_the_same_numbers_in_any_company(network, lengths):
    assert_as_alone(network, lengths, packs=False)


@settings(max_examples=3)
@given(lengths=LENGTHS)
def test_a_trajectory_has_the_same_numbers_anywhere_in_a_row(packable, lengths):
    assert_as_alone(packable, lengths, packs=True)


def test_the_check_before_the_first_step_passes_models_in_rows_of_their_own(network):
    require_kept_apart(network, packs=False)


def test_the_check_before_the_first_step_passes_models_in_packed_rows(packable):
    require_kept_apart(packable, packs=True)


def test_frequencies_that_follow_the_longest_are_seen_without_a_long_pass():
    model = family("phi3 longrope", max_position_embeddings=1 << 17)
    with pytest.raises(StartError, match="the rotary frequencies of Phi3ForCausalLM change when"):
        require_kept_apart(PolicyNetwork(model), packs=False)


class Widening(nn.Module):
    """Scores depend on the width of the batch, as soon as it is beyond a length."""

    def __init__(self, beyond, tokens_below=1 << 30):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.beyond, self.tokens_below = beyond, tokens_below

    def forward(self, input_ids, **_):
        is_wide = input_ids.shape[1] > self.beyond and input_ids.max() < self.tokens_below
        numbers = input_ids + 3.0 * is_wide
        return SimpleNamespace(
            logits=self.weight * numbers[:, :, None] * torch.linspace(0.0, 1.0, 101)
        )


@pytest.mark.parametrize(("packs", "field"), [(False, "model.name"), (True, "batch.rowLayout")])
def test_numbers_that_depend_on_longer_neighbours_are_refused(packs, field):
    message = f"^spec.{field}: .*Widening gives a trajectory of 5 tokens other log-probabilities"
    with pytest.raises(StartError, match=message):
        require_kept_apart(PolicyNetwork(Widening(6)), packs=packs)


def test_a_neighbour_that_passes_a_chunk_of_a_mixer_is_tried():
    model = Widening(66)
    require_kept_apart(PolicyNetwork(model), packs=False)
    model.convolution = nn.Conv1d(2, 2, 3, groups=2, padding=2)
    with pytest.raises(StartError, match="Widening gives a trajectory of 9 tokens other"):
        require_kept_apart(PolicyNetwork(model), packs=False)


class Named(nn.Module):
    """A model of a family, of which the forward pass is another."""

    def __init__(self, model, forward):
        super().__init__()
        self.inner, self.own = model, forward

    def forward(self, input_ids, **options):
        return self.own(input_ids, **options)


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
