from dataclasses import replace

import pytest
import torch

from tests.fixtures.learner.models import (
    PAD,
    llama,
    own_logprobs,
    sampled_groups,
    seeded_model,
    with_rewards,
)
from tests.fixtures.learner.updates import (
    SEEING,
    first_moments,
    make_spec,
    spec_of,
    with_micro_batches,
)
from vcpo.api import VCPORunSpec
from vcpo.wire.trajectory import VersionSpan
from vcpo_learner.update.policy_update import PolicyUpdate


def gradient(spec, *, staleness=0.3):
    model = seeded_model(llama, dtype=torch.float64)
    update = PolicyUpdate(model, spec, PAD)
    result = update.step(sampled_groups(model, staleness=staleness), policy_version=9)
    assert result.skipped is None
    return first_moments(update)


@pytest.mark.parametrize("method", SEEING)
def test_no_method_depends_on_the_split_into_micro_batches(method):
    whole, split = (gradient(with_micro_batches(spec_of(method), size)) for size in (64, 5))
    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-9 * float(whole.norm()))


def test_a_mask_that_leaves_nothing_skips_the_step():
    model = seeded_model(llama, dtype=torch.float64)
    update = PolicyUpdate(model, spec_of("geometricMask"), PAD)
    result = update.step(sampled_groups(model, staleness=2.0), policy_version=9)
    assert (str(result.skipped), result.masked_share) == ("no_gradient", 0.0)


def test_clipped_tokens_are_counted():
    model = seeded_model(llama, dtype=torch.float64)
    update = PolicyUpdate(model, spec_of("grpo"), PAD)
    result = update.step(sampled_groups(model, staleness=0.9), policy_version=9)
    assert 0.0 < result.masked_share < 1.0


def test_the_reference_is_the_policy_before_training():
    # With every reward equal only the drift from the reference is left, which is 0 at first.
    model = seeded_model(llama, dtype=torch.float64)
    equal = [with_rewards(group, [1.0] * len(group)) for group in sampled_groups(model)]
    update = PolicyUpdate(model, spec_of("agro"), PAD)
    assert str(update.step(equal, policy_version=9).skipped) == "no_gradient"
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight))
    assert update.step(equal, policy_version=9).skipped is None


def replay_spec(probability):
    document = make_spec().model_dump(by_alias=True)
    algorithm = {"method": "tba", "onPolicyEssRatio": 1.0, "onPolicyProbability": probability}
    batch = {**document["batch"], "promptPool": 9}
    return VCPORunSpec.model_validate({**document, "algorithm": algorithm, "batch": batch})


def one_token_longer(one):
    return replace(
        one,
        response_token_ids=(*one.response_token_ids, 1),
        rollout_logprobs=(*one.rollout_logprobs, -1.0),
        version_spans=(*one.version_spans, VersionSpan(policy_version=9, num_tokens=1)),
        reward=0.0,
    )


def test_a_step_on_replayed_groups_is_the_step_on_what_was_drawn():
    # Rewards of 500 outweigh all others, so that the second draw gives the first groups again.
    model, other = (
        seeded_model(llama, dtype=torch.float64),
        seeded_model(llama, dtype=torch.float64),
    )
    groups = sampled_groups(model)
    prized = [with_rewards(group, [500.0 + at for at in range(len(group))]) for group in groups]
    plain = PolicyUpdate(other, spec_of("tba"), PAD)
    replayed = PolicyUpdate(model, replay_spec(0.0), PAD)
    for update in (plain, replayed):
        update.step(prized, policy_version=9)
    later = [[one_token_longer(one) for one in group] for group in groups]
    expected = plain.step(prized, policy_version=10)
    found = replayed.step(later, policy_version=10)
    assert found.reward_mean == expected.reward_mean > 499.0
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-9)


def test_responses_that_are_drawn_again_are_not_fresh_again():
    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model)
    own = [
        [
            replace(
                one,
                reward=500.0 + at,
                version_spans=(VersionSpan(policy_version=9, num_tokens=one.num_sampled_tokens),),
            )
            for at, one in enumerate(group)
        ]
        for group in groups
    ]
    update = PolicyUpdate(model, replay_spec(0.0), PAD)
    assert update.step(own, policy_version=9).fresh
    later = [[one_token_longer(one) for one in group] for group in groups]
    again = update.step(later, policy_version=10)
    assert again.reward_mean > 499.0
    assert not again.fresh


def test_the_first_vtrace_step_credits_every_token_with_the_truncated_reward_to_come():
    # Values begin at 0, and on policy the target of each is the reward to come.
    model = seeded_model(llama, dtype=torch.float64)
    ((_, one),) = sampled_groups(model, num_groups=1, group_size=2, staleness=0.0)
    update = PolicyUpdate(model, spec_of("vtrace"), PAD)
    total = one.reward * own_logprobs(model, one).mean()
    parameters = sorted(model.parameters(), key=lambda parameter: parameter.ndim < 2)
    rows = torch.autograd.grad(-total, parameters)
    expected = torch.cat([row.flatten() for row in rows])
    update.step([[one]], policy_version=9)
    torch.testing.assert_close(first_moments(update), expected, rtol=1e-6, atol=1e-9)


def flat(state):
    """All numbers of a state, whatever holds them."""
    if isinstance(state, torch.Tensor):
        return state.flatten().tolist()
    if isinstance(state, dict):
        return [flat(each) for each in state.values()]
    return [flat(each) for each in state] if isinstance(state, list | tuple) else state


def test_a_critic_learns_nothing_from_a_step_that_broke(monkeypatch):
    def broken(*_):
        raise MemoryError("in the second pass")

    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model)
    update = PolicyUpdate(model, spec_of("vtrace"), PAD)
    update.step(groups, policy_version=9)
    before = flat(update.state_dict()["method"])
    monkeypatch.setattr("vcpo_learner.update.gradient.token_coefficients", broken)
    with pytest.raises(MemoryError, match="second pass"):
        update.begin(groups, policy_version=10)
    assert flat(update.state_dict()["method"]) == before
