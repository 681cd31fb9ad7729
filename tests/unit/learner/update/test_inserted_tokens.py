"""Inserted tokens are context only: they enter no gradient and no statistic."""

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.models import (
    PAD,
    VOCABULARY,
    llama,
    own_logprobs,
    resample,
    sampled_groups,
    seeded_model,
)
from tests.fixtures.learner.updates import (
    SEEING,
    expected_gradient,
    gradient_of_step,
    make_spec,
    spec_of,
    with_micro_batches,
)
from vcpo.wire.trajectory import TokenSpan, VersionSpan
from vcpo_learner.update.policy_update import PolicyUpdate

MODEL = seeded_model(llama, dtype=torch.float64)


def with_tool_output(one, random):
    """The trajectory with up to three spans of tool output, and new log-probabilities."""
    response, spans = [], []
    for token in one.response_token_ids:
        if random.random() < 0.5 and len(spans) < 3:
            spans.append(TokenSpan(start=len(response), num_tokens=random.randint(1, 4)))
            response += random.choices(range(1, VOCABULARY), k=spans[-1].num_tokens)
        response.append(token)
    noise = [random.uniform(-0.3, 0.3) for _ in one.response_token_ids]
    whole = replace(one, response_token_ids=tuple(response), inserted_spans=tuple(spans))
    return resample(MODEL, whole, noise)


def interrupted_groups(seed):
    random = Random(seed)
    return [[with_tool_output(one, random) for one in group] for group in sampled_groups(MODEL)]


def flat(groups):
    return [one for group in groups for one in group]


@pytest.mark.parametrize("micro_batch", [64, 5], ids=["one micro-batch", "three micro-batches"])
@pytest.mark.parametrize("baseline", ["opob", "groupMean", "grpo"])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_gradient_is_that_of_the_sampled_tokens_written_out_by_hand(
    baseline, micro_batch, seed
):
    groups = interrupted_groups(seed)
    expected = expected_gradient(MODEL, groups, baseline)
    spec = with_micro_batches(make_spec(baseline=baseline), micro_batch)
    gradient = gradient_of_step(seeded_model(llama, dtype=torch.float64), spec, groups)
    atol = 1e-9 * float(expected.norm())
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=atol)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_weights_and_lengths_are_those_of_the_sampled_tokens(seed):
    groups = interrupted_groups(seed)
    update = PolicyUpdate(seeded_model(llama, dtype=torch.float64), make_spec(), PAD)
    result = update.step(groups, policy_version=9)
    log_weights = [
        math.fsum(own_logprobs(MODEL, one).tolist()) - math.fsum(one.rollout_logprobs)
        for one in flat(groups)
    ]
    assert result.log_weights == pytest.approx(log_weights, abs=1e-12)
    weights = [math.exp(each) for each in log_weights]
    ess_ratio = sum(weights) ** 2 / sum(each**2 for each in weights) / len(weights)
    assert result.ess_ratio == pytest.approx(ess_ratio)
    lengths = [len(one.response_token_ids) for one in flat(sampled_groups(MODEL))]
    assert result.response_tokens_mean == pytest.approx(sum(lengths) / len(lengths))


def behind(one, *tokens):
    """The trajectory with tool output behind its last sampled token."""
    end = len(one.response_token_ids)
    return replace(
        one,
        response_token_ids=(*one.response_token_ids, *tokens),
        inserted_spans=(TokenSpan(start=end, num_tokens=len(tokens)),),
    )


@pytest.mark.parametrize("method", SEEING)
def test_no_method_counts_what_stands_behind_the_last_sampled_token(method):
    groups = sampled_groups(MODEL)
    longer = [[behind(one, 5, 6) for one in group] for group in groups]
    plain, followed = (
        gradient_of_step(seeded_model(llama, dtype=torch.float64), spec_of(method), batch)
        for batch in (groups, longer)
    )
    torch.testing.assert_close(followed, plain, rtol=1e-9, atol=1e-9 * float(plain.norm()))


def test_ages_are_those_of_the_sampled_tokens():
    one = with_tool_output(flat(sampled_groups(MODEL))[0], Random(1))
    count = one.num_sampled_tokens
    old = replace(one, version_spans=(VersionSpan(policy_version=5, num_tokens=count),))
    update = PolicyUpdate(seeded_model(llama, dtype=torch.float64), make_spec(baseline="none"), PAD)
    assert update.step([[old]], policy_version=9).ess_by_lag == {"4": 1.0}
