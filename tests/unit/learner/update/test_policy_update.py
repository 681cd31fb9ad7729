import io
import math
import re
import sys
from dataclasses import replace
from itertools import chain
from statistics import fmean

import pytest
import torch

from tests.fixtures.learner.models import (
    PAD,
    llama,
    resample,
    sampled_groups,
    seeded_model,
    trajectory,
    with_rewards,
)
from tests.fixtures.learner.updates import first_moments, make_spec
from vcpo.algo.ess.finite_batch import nats_at_size
from vcpo.algo.ess.importance_weights import ess_ratio
from vcpo.algo.health.fresh_tokens import gap_of
from vcpo.algo.health.guards import RateBackoff
from vcpo.records.reasons import SkipReason
from vcpo.wire.trajectory import VersionSpan
from vcpo_learner.update.policy_update import PolicyUpdate


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def with_log_weight(model, one, log_weight):
    """The trajectory with rollout log-probabilities forged to give it this log weight."""
    return resample(model, one, [-log_weight, *[0.0] * (len(one.response_token_ids) - 1)])


def with_optimizer(spec, **settings):
    optimizer = spec.optimizer.model_copy(update=settings)
    return spec.model_copy(update={"optimizer": optimizer})


def save_and_load(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def four_weights(model):
    """One group with weights 1, 1/2, 2, 4, of ESS ratio 7.5^2 / 21.25 / 4."""
    rows = [trajectory(number, reward=float(number % 2)) for number in range(4)]
    weights = [1.0, 0.5, 2.0, 4.0]
    return [with_log_weight(model, *row) for row in zip(rows, map(math.log, weights), strict=True)]


def test_the_learning_rate_is_scaled_by_the_root_of_the_ess_ratio():
    model = seeded_model(llama, dtype=torch.float64)
    update = PolicyUpdate(model, make_spec(), PAD)
    result = update.step([four_weights(model)], policy_version=9)
    assert result.ess_ratio == pytest.approx(56.25 / 21.25 / 4)
    assert result.learning_rate == pytest.approx(1e-3 * math.sqrt(56.25 / 21.25 / 4))


def test_the_rate_is_that_of_the_spec_times_schedule_scale_and_backoff():
    update = PolicyUpdate(seeded_model(llama), with_optimizer(make_spec(), warmup_steps=4), PAD)
    groups = sampled_groups(seeded_model(llama))
    update.step(groups, policy_version=0)
    update.health.backoff = RateBackoff(factor=0.25)
    second = update.step(groups, policy_version=1)
    assert (second.learning_rate_schedule, second.learning_rate_backoff) == (0.5, 0.25)
    rate = 1e-3 * 0.5 * second.learning_rate_scale * 0.25
    assert second.learning_rate == pytest.approx(rate)


def region_rates(base, batches, *, sure_target, horizon):
    """Rates of a trust region's steps, as its formulas say.

    batches: ESS ratio of four weights, lag in steps, and surprisal in nats per token.
    """
    squares, nats, distance, bound, unsure = [], 0.0, 0.0, None, batches[0][2]
    for ratio, lag, surprisal in batches:
        unsure = 0.9 * unsure + 0.1 * surprisal
        target = max(0.05, sure_target ** max(1.0, unsure / 0.3))
        walked, start = math.sqrt(sum(squares[-lag:])) if lag else 0.0, 0.0
        if walked > 0.0:  # means of about ten steps, and at first the newest, which grows as d^2
            newest = nats_at_size(-math.log(ratio), 4, 64)
            start = walked * math.sqrt(-math.log(sure_target) / newest / horizon)
            nats, distance = 0.9 * nats - 0.1 * math.log(ratio), 0.9 * distance + 0.1 * walked
        allowed = base / horizon if bound is None else max(2.0 * bound, start)
        if nats > 0.0:
            as_of_64 = nats_at_size(nats, 4, 64)
            allowed = min(allowed, -math.log(target) * distance / as_of_64 / math.sqrt(horizon))
        bound = min(base, max(allowed, base / 64))
        rate = bound * min(1.0, math.sqrt(ratio / target))
        squares.append(rate * rate)
        yield rate


def test_the_rates_of_a_trust_region_are_those_of_its_formulas_step_by_step():
    # Weights 1, 1.01, .99, 1 have an ESS ratio of 4 / 4.0002: enough. Those of the helper damp.
    fields = {"learningRateRule": "trustRegion", "targetEssRatio": 0.9}
    model = seeded_model(llama, dtype=torch.float64)
    update = PolicyUpdate(model, make_spec(maxPolicyLagSteps=4, **fields), PAD)
    fresh, stale = (
        [0.0, math.log(1.01), math.log(0.99), 0.0],
        [0.0, -math.log(2), *map(math.log, (2, 4))],
    )
    ratios = {id(fresh): 4 / 4.0002, id(stale): 56.25 / 21.25 / 4}
    found, batches = [], []
    for version, weights in enumerate([stale, fresh, fresh, fresh, stale, fresh]):
        lag = min(version, 2)
        rows = [
            trajectory(number, reward=float(number % 2), policy_version=version - lag)
            for number in range(4)
        ]
        group = [with_log_weight(model, *row) for row in zip(rows, weights, strict=True)]
        found.append(update.step([group], policy_version=version).learning_rate)
        surprisal = -fmean(chain.from_iterable(each.rollout_logprobs for each in group))
        batches.append((ratios[id(weights)], lag, surprisal))
    expected = list(region_rates(1e-3, batches, sure_target=0.9, horizon=32))
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_first_step_moves_no_parameter_by_more_than_the_scaled_rate():
    model = seeded_model(llama, dtype=torch.float64)
    before = flat(model)
    result = PolicyUpdate(model, make_spec(), PAD).step([four_weights(model)], policy_version=9)
    moved = float((flat(model) - before).abs().max())
    assert moved == pytest.approx(result.learning_rate, rel=1e-3)


def test_the_result_describes_the_batch():
    model = seeded_model(llama, dtype=torch.float64)
    result = PolicyUpdate(model, make_spec(), PAD).step([four_weights(model)], policy_version=9)
    assert (result.reward_mean, result.response_tokens_mean) == (0.5, 3.0)
    assert result.importance_weight_max == pytest.approx(4.0)
    assert result.log_weights == pytest.approx([0.0, -math.log(2), math.log(2), math.log(4)])


def test_a_step_has_the_window_of_rewards_that_ends_with_it_and_the_limits_before_it():
    model = seeded_model(llama)
    update, group = PolicyUpdate(model, make_spec(), PAD), four_weights(model)
    rewarded = with_rewards(group, [0.0, 0.0, 1.0, 1.0])
    results = [update.step([rewarded], policy_version=9) for _ in range(10)]
    wrong = update.step([with_rewards(group, [0.0, 0.0, 1.0, 1e4])], policy_version=9)
    assert [result.reward_window_mean for result in results] == [None] * 9 + [0.5]
    assert results[-1].reward_window_error == pytest.approx(0.5 / math.sqrt(40))
    assert (results[0].reward_limits, wrong.reward_limits) == (None, (0.5 - 50, 0.5 + 50))
    assert (wrong.reward_mean, wrong.reward_window_mean) == (2500.25, 0.5)


def test_surprisal_is_the_mean_over_tokens_of_what_they_were_sampled_with():
    logprobs = [(-1.0, -2.0, -3.0), (-4.0,)]  # by trajectories it would be 3, by tokens 2.5
    group = [
        trajectory(number, response=(5,) * len(each), logprobs=each, reward=float(number))
        for number, each in enumerate(logprobs)
    ]
    update = PolicyUpdate(seeded_model(llama), make_spec(), PAD)
    assert update.step([group], policy_version=9).surprisal_nats == 2.5


def test_the_baseline_shift_is_measured_from_the_group_mean():
    # Without a baseline 0 is subtracted: 0 minus the mean reward of 1/2.
    model = seeded_model(llama)
    update = PolicyUpdate(model, make_spec(baseline="none"), PAD)
    shift = update.step([four_weights(model)], policy_version=9).baseline_shift
    assert shift == pytest.approx(-0.5)


def test_a_huge_weight_is_truncated_and_leaves_the_batch_an_ess_of_one():
    model = seeded_model(llama)
    (first, second, third, fourth), *_ = sampled_groups(model)
    group = [with_log_weight(model, first, 1e4), second, third, fourth]
    result = PolicyUpdate(model, make_spec(), PAD).step([group], policy_version=9)
    assert (result.ess_ratio, result.learning_rate_scale) == (0.25, 0.5)
    assert result.importance_weight_max == sys.float_info.max
    assert result.skipped is None
    assert torch.isfinite(flat(model)).all()


def test_logits_that_are_not_numbers_skip_the_step():
    model = seeded_model(llama)
    groups = sampled_groups(model)
    update = PolicyUpdate(model, make_spec(), PAD)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    result = update.step(groups, policy_version=9)
    assert (result.skipped, result.ess_ratio) == (SkipReason.NON_FINITE_WEIGHT, 0.0)
    assert re.match(r"log_ratios of trajectory 'lease/\d+'\[0\] is nan", result.skip_detail or "")


def with_impossible_weights(model, groups):
    return [[replace(one, rollout_logprobs=(-math.inf, -1.0, -1.0)) for one in four_weights(model)]]


def with_an_infinite_gradient(model, groups):
    model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    return groups


def with_equal_rewards(model, groups):
    return [with_rewards(group, [0.1] * 4) for group in groups]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (with_impossible_weights, SkipReason.NON_FINITE_WEIGHT),
        (with_an_infinite_gradient, SkipReason.NON_FINITE_GRADIENT),
        (with_equal_rewards, SkipReason.NO_GRADIENT),
    ],
)
def test_a_step_that_is_skipped_moves_neither_parameters_nor_moments(spoil, reason):
    model = seeded_model(llama)
    spec = with_optimizer(make_spec(baseline="groupMean"), weight_decay=0.1)
    update = PolicyUpdate(model, spec, PAD)
    groups = sampled_groups(model)
    update.step(groups, policy_version=9)
    parameters, moments = flat(model), first_moments(update).clone()
    result = update.step(spoil(model, groups), policy_version=9)
    assert (result.skipped, result.learning_rate_scale) == (reason, 0.0)
    assert torch.equal(flat(model), parameters)
    assert torch.equal(first_moments(update), moments)


def test_groups_of_equal_rewards_count_in_the_ess():
    model = seeded_model(llama, dtype=torch.float64)
    rows = four_weights(model)
    groups = [with_rewards(rows[:2], [0.0, 1.0]), with_rewards(rows[2:], [1.0, 1.0])]
    result = PolicyUpdate(model, make_spec(), PAD).step(groups, policy_version=9)
    assert result.ess_ratio == pytest.approx(56.25 / 21.25 / 4)


def of_versions(one, first, others):
    """The trajectory with its first token sampled by one version and the others by another."""
    spans = [VersionSpan(policy_version=first, num_tokens=1)]
    if len(one.response_token_ids) > 1:
        rest = len(one.response_token_ids) - 1
        spans.append(VersionSpan(policy_version=others, num_tokens=rest))
    return replace(one, version_spans=tuple(spans))


def on_policy_ratio(versions):
    """What 48 noisy trajectories sampled by these versions make of the ratio at version 8."""
    model = seeded_model(llama)
    update = PolicyUpdate(model, make_spec(onPolicyEssRatio=None), PAD)
    noisy = sampled_groups(model, num_groups=12)
    groups = [[of_versions(one, *versions) for one in group] for group in noisy]
    return update.step(groups, policy_version=8).on_policy_ess_ratio


@pytest.mark.parametrize("versions", [(8, 8), (7, 8)], ids=["whole", "their last tokens"])
def test_tokens_of_the_current_version_calibrate(versions):
    assert 0.5 < on_policy_ratio(versions) < 1.0


def test_responses_beside_the_batch_calibrate_a_learner_that_sees_only_stale_ones():
    model = seeded_model(llama)
    update = PolicyUpdate(model, make_spec(onPolicyEssRatio=None), PAD)
    noisy = sampled_groups(model, num_groups=12)
    stale = [[of_versions(one, 2, 2) for one in group] for group in noisy]
    newest = [of_versions(one, 8, 8) for group in noisy for one in group]
    update.begin(stale, policy_version=8)
    result = update.finish(newest)
    assert 0.5 < result.on_policy_ess_ratio < 1.0
    assert (result.calibration_age_steps, len(result.fresh)) == (0, 48)
    assert update.step(stale, policy_version=9).calibration_age_steps == 1


def test_responses_beside_the_batch_are_not_learned_from():
    spec = make_spec()
    groups = sampled_groups(seeded_model(llama))
    newest = [of_versions(one, 9, 9) for group in groups for one in group]
    models = [seeded_model(llama), seeded_model(llama)]
    for model, beside in zip(models, ([], newest), strict=True):
        update = PolicyUpdate(model, spec, PAD)
        update.begin(groups, policy_version=9)
        update.finish(beside)
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_responses_beside_the_batch_are_scored_before_the_step():
    model = seeded_model(llama)
    groups = sampled_groups(model)
    own = [[of_versions(one, 9, 9) for one in group] for group in groups]
    expected = PolicyUpdate(seeded_model(llama), make_spec(), PAD).step(own, policy_version=9).fresh
    update = PolicyUpdate(model, make_spec(), PAD)
    beside = [one for group in own for one in group]
    update.begin(groups, policy_version=9)
    found = update.finish(beside).fresh
    assert gap_of(found).value == pytest.approx(gap_of(expected).value, rel=1e-5)


def test_a_response_beside_the_batch_that_is_no_number_costs_no_step():
    model = seeded_model(llama)
    groups = sampled_groups(model)
    one = of_versions(groups[0][0], 9, 9)
    newest = [replace(one, rollout_logprobs=(-math.inf, *one.rollout_logprobs[1:]))]
    update = PolicyUpdate(model, make_spec(), PAD)
    update.begin(groups, policy_version=9)
    result = update.finish(newest)
    assert (result.skipped, result.fresh) == (None, ())


def test_a_batch_of_stale_responses_asks_for_fresh_tokens_and_a_fresh_batch_for_none():
    model = seeded_model(llama)
    groups = sampled_groups(model, num_groups=12)
    num_tokens = sum(one.num_sampled_tokens for group in groups for one in group)
    update = PolicyUpdate(model, make_spec(onPolicyEssRatio=None), PAD)
    # Nothing is known yet: as much as may be, a quarter of the batch.
    wanted = update.begin(groups, policy_version=8).wanted_fresh_tokens
    assert wanted == math.ceil(num_tokens / 4)
    given = PolicyUpdate(model, make_spec(onPolicyEssRatio=0.9), PAD)
    fresh = [[of_versions(one, 8, 8) for one in group] for group in groups]
    assert given.begin(fresh, policy_version=8).wanted_fresh_tokens == 0


def test_what_was_calibrated_is_remembered_in_later_steps():
    model = seeded_model(llama)
    update = PolicyUpdate(model, with_limit(make_spec(onPolicyEssRatio=None), 0.5), PAD)
    groups = sampled_groups(model, num_groups=12)
    fresh = [[of_versions(one, 8, 8) for one in group] for group in groups]
    first, later = (update.step(batch, policy_version=8) for batch in (fresh, groups))
    assert later.on_policy_ess_ratio == first.on_policy_ess_ratio < 1.0


@pytest.mark.parametrize("rule", ["sqrt", "trustRegion"])
def test_a_restored_update_takes_bit_identical_steps(rule, tmp_path):
    model, groups = seeded_model(llama), sampled_groups(seeded_model(llama))
    algorithm = make_spec(onPolicyEssRatio=None, learningRateRule=rule)
    spec = with_optimizer(algorithm, warmup_steps=5, betas=(0.9, 0.95))
    update = PolicyUpdate(model, spec, PAD)
    update.step(groups, policy_version=0)
    update.save_tensors(tmp_path).result()
    twin = seeded_model(llama)
    restored = PolicyUpdate(twin, spec, PAD)
    restored.load_tensors(tmp_path)
    restored.load_state_dict(save_and_load(update.state_dict()))
    results = [one.step(groups, policy_version=1) for one in (update, restored)]
    assert results[0] == results[1]
    assert torch.equal(flat(model), flat(twin))


def test_a_state_that_lacks_a_part_is_refused():
    update = PolicyUpdate(seeded_model(llama), make_spec(), PAD)
    with pytest.raises(
        ValueError,
        match=r"lacks \['method', 'mismatch', 'random', 'replay', 'trust_region', 'warning'\]",
    ):
        update.load_state_dict({"updates_taken": 3})


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="is empty"):
        PolicyUpdate(seeded_model(llama), make_spec(), PAD).step([], policy_version=0)


def with_limit(spec, nats):
    learner = spec.learner.model_copy(update={"max_mismatch_nats": nats})
    return spec.model_copy(update={"learner": learner})


def of_workers(groups, **offsets):
    """Groups of fresh responses, one group after another of the next worker.

    offsets: by worker, nats that its log-probabilities are off by, each token.
    """
    names = list(offsets)
    return [
        [
            replace(
                one,
                worker_id=names[number % len(names)],
                version_spans=(VersionSpan(policy_version=9, num_tokens=one.num_sampled_tokens),),
                rollout_logprobs=tuple(
                    each - offsets[names[number % len(names)]] for each in one.rollout_logprobs
                ),
            )
            for one in group
        ]
        for number, group in enumerate(groups)
    ]


def test_a_worker_that_is_off_does_not_calibrate_its_own_fault():
    model = seeded_model(llama)
    groups = sampled_groups(model, num_groups=24, staleness=0.02)
    update = PolicyUpdate(model, make_spec(onPolicyEssRatio=None), PAD)
    result = update.step(of_workers(groups, a=0.0, b=0.0, c=0.0, bad=1.0), policy_version=9)
    assert result.on_policy_ess_ratio > 0.99
    published = math.sqrt(ess_ratio(result.log_weights) / 1.0)
    assert published < 0.9
    assert result.learning_rate_scale == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("lowest", [-100.0, -3e38])
def test_one_group_of_impossible_log_probabilities_does_not_calibrate_itself(lowest):
    # A submission may not have -3e38; a batch with it would have no other scale.
    model = seeded_model(llama)
    groups = sampled_groups(model, num_groups=8, staleness=0.02)
    fresh = of_workers(groups, only=0.0)
    fresh[0] = [
        replace(one, rollout_logprobs=(lowest,) * one.num_sampled_tokens) for one in fresh[0]
    ]
    update = PolicyUpdate(model, make_spec(onPolicyEssRatio=None), PAD)
    result = update.step(fresh, policy_version=9)
    assert ess_ratio(result.log_weights) < 0.07
    assert result.learning_rate_scale < 0.27
    assert result.on_policy_ess_ratio > 0.9


def test_a_worker_at_fault_is_named_and_has_no_vote_any_more():
    model = seeded_model(llama)
    groups = sampled_groups(model, num_groups=12, staleness=0.02)
    update = PolicyUpdate(model, with_limit(make_spec(onPolicyEssRatio=None), 0.03), PAD)
    fleet = of_workers(groups, a=0.0, b=0.0, bad=1.0)
    beside = [one for group in fleet for one in group] * 4
    update.begin(groups, policy_version=9)
    result = update.finish(beside)
    (fault,) = result.mismatch.at_fault
    assert (fault.worker, fault.gap_nats) == ("bad", pytest.approx(1.0, rel=0.02))
    held = update.state_dict()["mismatch"]["blocks"]
    assert {each["worker"] for each in held} == {"a", "b"}
    assert {each.worker for each in result.fresh} == {"a", "b", "bad"}
