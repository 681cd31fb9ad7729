"""Sequences decoded in one batch: each is sampled as if alone, under the weights in use."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.families import HYBRIDS, INDEXED, family
from tests.fixtures.rollout.models import build_model, forward_logprobs, parameters_of, request_for
from vcpo.wire.trajectory import FinishReason
from vcpo.wire.v1 import work_pb2
from vcpo_rollout.engines.engine import EngineError
from vcpo_rollout.engines.hf import cache
from vcpo_rollout.engines.hf.decoding import DecodeBatch, PartialSequence, sample_tokens
from vcpo_rollout.engines.seeds import response_seed, token_seed

SHORT, MIDDLE, LONG = (5, 6), (9, 3, 3, 7, 12), tuple(range(1, 20))


def make_batch(model, *, end_token_ids=frozenset(), seed=0):
    """A batch with the weights of a model in use as version 1."""
    batch = DecodeBatch(model, end_token_ids=end_token_ids, pad_token_id=0, seed=seed)
    batch.swap(1, parameters_of(model))
    return batch


def make_draft(prompt, **settings):
    return PartialSequence(request=request_for(prompt, **settings))


def run(batch):
    """Step until all have ended."""
    ended = {}
    while batch.sequences:
        ended |= batch.step()
    return ended


def assert_scored_as_alone(ended, model):
    for sequence, generation in ended.items():
        request = sequence.request
        expected = forward_logprobs(
            model, request.prompt_token_ids, generation.token_ids, request.temperature
        )
        # Both are float32, summed in another order; a wrong token or position costs 1e-3.
        assert generation.logprobs == pytest.approx(expected, abs=5e-5)


def test_long_responses_are_scored_right_to_their_ends():
    model = build_model()
    batch = make_batch(model)
    batch.admit([make_draft(SHORT, max_new_tokens=90), make_draft(LONG, max_new_tokens=50)])
    assert_scored_as_alone(run(batch), model)


KINDS = {"full": build_model, "sliding": partial(build_model, sliding_window=4)} | {
    kind: partial(family, kind) for kind in HYBRIDS | INDEXED
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("order", [(SHORT, LONG), (LONG, SHORT)], ids=["longer", "shorter"])
def test_a_sequence_that_joins_later_changes_nobodys_numbers(order, make):
    model = make()
    batch = make_batch(model)
    first, second = order
    batch.admit([make_draft(first, max_new_tokens=9), make_draft(MIDDLE, max_new_tokens=4)])
    for _ in range(3):
        batch.step()
    # The prompt of a group is read once.
    batch.admit([make_draft(second), make_draft(second)])
    ended = run(batch)
    assert len(ended) == 4
    assert_scored_as_alone(ended, model)


def test_a_join_computes_only_the_tokens_of_those_who_join_and_a_groups_prompt_once():
    model = build_model()
    batch = make_batch(model)
    batch.admit([make_draft(LONG)])
    computed, heads = [], []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    model.lm_head.register_forward_pre_hook(lambda module, args: heads.extend(args))
    batch.admit([make_draft(SHORT), make_draft(SHORT[::-1])])
    batch.admit([make_draft(prompt) for prompt in (SHORT, MIDDLE, SHORT, SHORT, MIDDLE)])
    assert computed == [(2, 2), (2, 5)]
    assert all(each.is_contiguous() and each.shape[1] == 1 for each in heads)


def test_rows_are_read_again_after_a_swap_with_masks_that_stay_bounded(monkeypatch):
    monkeypatch.setattr(cache, "_MASK_ELEMENTS", 2 * 21**2)
    model = build_model()
    batch = make_batch(model)
    others = (LONG[::-1], SHORT, MIDDLE, (8, *LONG[1:]))
    batch.admit([make_draft(prompt) for prompt in (LONG, *others)])
    batch.step()
    computed = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["attention_mask"].shape),
        with_kwargs=True,
    )
    batch.swap(2, parameters_of(model))
    hook.remove()
    # Contexts of 20, 20, 3, 6 and 20 tokens; two rows of 20 are allowed, and five of at most 6.
    assert computed == [(2, 20), (2, 6), (1, 20)]
    assert_scored_as_alone(run(batch), model)


COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 12), st.integers(1, 6)),
        st.tuples(st.just("step")),
        st.tuples(st.just("drop")),
        st.tuples(st.just("swap"), st.sampled_from([1, 2])),
    ),
    max_size=12,
)


POLICIES = {version: build_model(seed=version) for version in (1, 2)}
"""The weights of each version, in models of their own."""


def carry_out(commands):
    """Carry out commands on a fresh batch, run it to the end, and return what ended."""
    batch = make_batch(build_model(seed=1), end_token_ids=frozenset({3}))
    ended = {}
    for command in commands:
        match command:
            case "admit", length, limit:
                batch.admit([make_draft(range(length), max_new_tokens=limit)])
            case ("step",):
                ended |= batch.step()
            case ("drop",):
                batch.drop(batch.sequences[:1])
            case "swap", version:
                batch.swap(version, parameters_of(POLICIES[version]))
    return ended | run(batch)


@settings(max_examples=40, deadline=None)
@given(commands=COMMANDS)
def test_whatever_happens_each_token_is_scored_by_the_version_it_is_labelled_with(commands):
    for sequence, generation in carry_out(commands).items():
        prompt, tokens = sequence.request.prompt_token_ids, generation.token_ids
        expected = []
        for span in generation.version_spans:
            scored = slice(len(expected), len(expected) + span.num_tokens)
            expected += forward_logprobs(POLICIES[span.policy_version], prompt, tokens)[scored]
        assert len(expected) == len(tokens)
        # Both are float32, summed in another order; a wrong token or position costs 1e-3.
        assert generation.logprobs == pytest.approx(expected, abs=5e-5)


def test_an_end_token_ends_the_sequence_and_is_its_last_token():
    every_token = frozenset(range(40))
    batch = make_batch(build_model(), end_token_ids=every_token)
    sequence = make_draft(SHORT)
    batch.admit([sequence])
    generation = batch.step()[sequence]
    assert generation.finish_reason is FinishReason.STOP
    assert len(generation.token_ids) == 1


@pytest.mark.parametrize("seeded", [True, False])
def test_first_tokens_are_drawn_as_often_as_the_model_says(seeded):
    model = build_model()
    batch = make_batch(model)
    draws = 8_000
    seeds = range(draws) if seeded else [None] * draws
    batch.admit([make_draft(SHORT, max_new_tokens=1, temperature=2.0, seed=seed) for seed in seeds])
    drawn = [generation.token_ids[0] for generation in batch.step().values()]
    expected = [
        draws * math.exp(forward_logprobs(model, SHORT, [token], 2.0)[0]) for token in range(40)
    ]
    statistic = sum(
        (drawn.count(token) - count) ** 2 / count for token, count in enumerate(expected)
    )
    assert min(expected) > 5  # the statistic follows its law
    assert statistic < 72.05  # chi-square with 39 degrees of freedom, 99.9 %


def test_a_seed_draws_the_token_whose_share_of_the_probabilities_holds_it():
    # Shares by hand: token 1 up to 0.5, token 2 up to 0.75, token 4 up to 1; 0, 3 and 5 have none.
    logits = torch.tensor([-math.inf, 2.0, 1.0, -math.inf, 1.0, -math.inf]) * math.log(2.0)
    places = 0.0, 0.49, 0.51, 0.74, 0.76, 1.0
    seeds = [min(round(place * 2**63), 2**63 - 1) for place in places]
    rows = logits.expand(len(seeds), -1)
    token_ids, _ = sample_tokens(rows, [1.0] * len(seeds), seeds, torch.Generator())
    assert token_ids == [1, 1, 2, 2, 4, 4]


@given(data=st.data())
def test_the_last_number_before_one_draws_a_token_of_some_probability(data):
    shares = data.draw(st.lists(st.floats(-60.0, 60.0), min_size=1, max_size=40))
    logits = torch.tensor([[*shares, -math.inf]])
    (token_id,), (logprob,) = sample_tokens(logits, [1.0], [2**63 - 1], torch.Generator())
    assert token_id < len(shares)
    assert math.exp(logprob) > 0.0


def test_a_sequence_with_a_seed_is_the_same_alone_among_others_and_resumed():
    def sample(*others, seed=11, engine_seed=1, partial=None):
        batch = make_batch(build_model(), seed=engine_seed)
        own = make_draft(MIDDLE, max_new_tokens=24, seed=seed, partial_response=partial)
        batch.admit([*others, own])
        return run(batch)[own].token_ids

    whole = sample()
    assert sample(seed=12) != whole
    others = [make_draft(LONG, seed=3), make_draft(SHORT), make_draft(SHORT, seed=4)]
    assert sample(*others, engine_seed=2) == whole

    batch = make_batch(build_model(), seed=3)
    begun = make_draft(MIDDLE, max_new_tokens=24, seed=11)
    batch.admit([begun])
    for _ in range(9):
        batch.step()
    # Turns of a conversation are requests of one seed, so tokens of the prompt count.
    assert begun.next_seed == token_seed(11, len(MIDDLE) + 9)
    assert sample(partial=begun.to_partial_response(), engine_seed=4) == whole


def test_logits_that_are_not_numbers_fail_the_sequence_and_a_new_policy_cures_it():
    model = build_model()
    good = parameters_of(model)
    batch = make_batch(model)
    batch.swap(2, {name: torch.full_like(tensor, math.nan) for name, tensor in good.items()})
    sequence = make_draft(SHORT)
    batch.admit([sequence])
    failure = batch.step()[sequence]
    batch.swap(3, good)
    batch.admit([make_draft(SHORT)])
    assert isinstance(failure, EngineError)
    assert "policy version 2" in str(failure)
    assert all(math.isfinite(logprob) for end in run(batch).values() for logprob in end.logprobs)


def test_seeds_differ_between_leases_responses_and_tokens():
    leases = [work_pb2.Lease(sampling=work_pb2.Sampling(seed=seed)) for seed in (0, 1, 2**64 - 1)]
    responses = [response_seed(lease, number) for lease in leases for number in range(8)]
    tokens = {token_seed(response, at) for response in responses for at in range(64)}
    assert len(tokens) == 3 * 8 * 64
    assert all(0 <= seed < 2**63 for seed in tokens)


def test_a_lease_without_a_seed_leaves_the_draw_to_the_engine():
    assert response_seed(work_pb2.Lease(), 0) is None
