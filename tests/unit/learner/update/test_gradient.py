import math
from dataclasses import replace
from fractions import Fraction
from operator import mul
from random import Random
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.models import (
    FAMILIES,
    PAD,
    VOCABULARY,
    llama,
    own_logprobs,
    resample,
    sampled_groups,
    seeded_model,
    trajectory,
    with_rewards,
)
from tests.fixtures.learner.updates import (
    CAP,
    SEEING,
    by_hand,
    contribution,
    expected_gradient,
    gradient_of_step,
    make_spec,
    spec_of,
    truncated_weight,
    with_micro_batches,
)
from vcpo.api.learner import ActivationCheckpointing, GradientMode, Learner
from vcpo.wire.trajectory import TokenSpan, VersionSpan
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.per_sample_gradients.slot_sums import ParameterSums
from vcpo_learner.per_sample_gradients.taps import LostGradientError
from vcpo_learner.update.gradient import GradientAccumulation
from vcpo_learner.update.policy_update import PolicyUpdate

BASELINES = ["opob", "pessimistic", "groupMean", "rloo", "grpo", "none"]


def assert_same(gradient, expected, rtol=1e-9):
    torch.testing.assert_close(gradient, expected, rtol=rtol, atol=rtol * float(expected.norm()))


@pytest.mark.parametrize("micro_batch", [64, 5], ids=["one micro-batch", "three micro-batches"])
@pytest.mark.parametrize("baseline", BASELINES)
def test_the_gradient_is_the_estimator_written_out_by_hand(baseline, micro_batch):
    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model)
    expected = expected_gradient(model, groups, baseline)
    spec = with_micro_batches(make_spec(baseline=baseline), micro_batch)
    assert_same(gradient_of_step(model, spec, groups), expected)


@pytest.mark.parametrize("micro_batch", [64, 5], ids=["one micro-batch", "three micro-batches"])
def test_signal_and_noise_are_those_of_all_pairs_of_trajectories(micro_batch):
    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model)
    terms, fresh = [], 0.0
    for group in groups:
        gradients = [contribution(model, one) for one in group]
        weights = [truncated_weight(model, one) for one in group]
        norms = [float(each @ each) for each in gradients]
        advantages = by_hand("opob", [one.reward for one in group], norms, weights)
        terms += [a * each for a, each in zip(advantages, gradients, strict=True)]
        fresh += sum(a * a * n / w for a, n, w in zip(advantages, norms, weights, strict=True))
    size, noise = len(terms), sum(float(term @ term) for term in terms)
    pairs = [float(one @ other) for at, one in enumerate(terms) for other in terms[:at]]
    update = PolicyUpdate(model, with_micro_batches(make_spec(), micro_batch), PAD)
    found = update.step(groups, policy_version=9).diagnostics
    assert found["gradient_signal"] == pytest.approx(fmean(pairs), rel=1e-9)
    assert found["gradient_noise"] == pytest.approx(noise / size**2, rel=1e-9)
    assert found["fresh_gradient_noise"] == pytest.approx(fresh / size**2, rel=1e-9)


def test_a_pessimistic_baseline_expects_the_weights_that_the_mismatch_leaves():
    # log w ~ N(-v/2, v) on policy, with v = log 2: E min(w, c) by its closed form.
    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model)
    spread, edge = math.sqrt(math.log(2.0)), math.log(CAP)
    below, above = (
        0.5 * math.erfc(-x / math.sqrt(2))
        for x in (edge / spread - spread / 2, -edge / spread - spread / 2)
    )
    expected = expected_gradient(model, groups, "pessimistic", usual_weight=below + CAP * above)
    spec = make_spec(baseline="pessimistic", onPolicyEssRatio=0.5)
    assert_same(gradient_of_step(model, spec, groups), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_the_estimators_for_every_family_of_models(family):
    model = seeded_model(FAMILIES[family], dtype=torch.float64)
    groups = sampled_groups(model)
    expected = expected_gradient(model, groups, "opob")
    assert_same(gradient_of_step(model, make_spec(), groups), expected)


def dominated_group(model, nats):
    """Four responses of which the third weighs exp(nats) times as much as the others."""
    rows = [trajectory(number, response=(5, 6, 7 + number)) for number in range(4)]
    ratios = [[0.0] * 3 if number == 2 else [nats, 0.0, 0.0] for number in range(4)]
    group = [resample(model, *row) for row in zip(rows, ratios, strict=True)]
    return with_rewards(group, [0.0, 1.0, 0.3, 0.0])


def dominated_gradient(model, group):
    """-(1/B) sum_i (R_i - b) g_i, with b in fractions: floats do not tell it from one's reward."""
    contributions = [contribution(model, one) for one in group]
    norms = [Fraction(float(each @ each)) for each in contributions]
    rewards = [Fraction(one.reward) for one in group]
    baseline = sum(map(mul, norms, rewards)) / sum(norms)
    advantages = [float(reward - baseline) for reward in rewards]
    return -sum(map(mul, advantages, contributions)) / len(group)


@pytest.mark.parametrize("way", ["kept", "reduced"])
@pytest.mark.parametrize("nats", [15.0, 20.0, 40.0])
def test_a_trajectory_that_dominates_its_group_costs_the_others_no_digits(nats, way, monkeypatch):
    module = "vcpo_learner.per_sample_gradients.measurement.is_kept_cheaper"
    monkeypatch.setattr(module, lambda *_: way == "kept")
    model, exact = seeded_model(llama), seeded_model(llama, dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    group = dominated_group(exact, nats)
    expected = dominated_gradient(exact, group)
    found = gradient_of_step(model, make_spec(), [group]).double()
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_some_weights_of_these_batches_are_truncated_and_some_are_not():
    model = seeded_model(llama, dtype=torch.float64)
    update = PolicyUpdate(model, make_spec(), PAD)
    log_weights = update.step(sampled_groups(model), policy_version=9).log_weights
    assert min(log_weights) < 0.0 < math.log(CAP) < max(log_weights)


def test_the_learner_scores_at_the_temperature_of_the_rollouts():
    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model)
    expected = expected_gradient(model, groups, "opob", temperature=0.6)
    assert_same(gradient_of_step(model, make_spec(temperature=0.6), groups), expected)


@pytest.mark.parametrize("mode", ["onePass", "twoPass"])
@pytest.mark.parametrize("micro_batch", [64, 5, 1], ids=["whole", "several", "one by one"])
@pytest.mark.parametrize("baseline", ["opob", "pessimistic", "groupMean"])
def test_one_baseline_for_the_batch_is_that_of_one_large_group(
    baseline, micro_batch, mode, monkeypatch
):
    monkeypatch.setattr("vcpo_learner.schedule.micro_steps._STEP_TOKENS", 0)  # each length alone
    model = seeded_model(llama, dtype=torch.float64)
    groups = [
        [
            replace(one, rollout_logprobs=[each + 0.3 for each in one.rollout_logprobs])
            for one in group
        ]
        for group in sampled_groups(model)
    ]
    together = [one for group in groups for one in group]
    assert fmean(truncated_weight(model, one) for one in together) < 0.9
    expected = expected_gradient(model, [together], baseline)
    spec = make_spec(baseline=baseline, baselineScope="batch")
    spec = with_micro_batches(spec, micro_batch)
    learner = spec.learner.model_copy(update={"gradient_mode": GradientMode(mode)})
    found = gradient_of_step(model, spec.model_copy(update={"learner": learner}), groups)
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("learner", "is_one_pass"),
    [
        ({"replicas": 2}, False),
        ({"replicas": 2, "gradientMode": "onePass"}, True),
        # A copy in each pod: only gradients go from machine to machine, once a step.
        ({"replicas": 2, "fsdpSize": 1}, True),
        ({"processes": 2}, True),
    ],
)
def test_where_pods_share_a_copy_of_the_parameters_a_batch_is_gone_through_twice(
    learner, is_one_pass
):
    model = seeded_model(llama)
    spec = make_spec()
    spec = spec.model_copy(update={"learner": Learner.model_validate(learner)})
    batch = GradientAccumulation(model, spec, PAD).score(sampled_groups(model), policy_version=0)
    assert batch.is_accumulated is is_one_pass


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_order_of_groups_and_of_trajectories_in_them_changes_nothing(baseline):
    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model)
    turned = [group[::-1] for group in (groups[1], groups[2], groups[0])]
    spec = make_spec(baseline=baseline)
    gradient = gradient_of_step(seeded_model(llama, dtype=torch.float64), spec, groups)
    assert_same(gradient_of_step(model, spec, turned), gradient, rtol=1e-12)


@pytest.mark.parametrize("baseline", ["opob", "groupMean"])
def test_a_group_of_equal_rewards_only_dilutes_the_gradient(baseline):
    model = seeded_model(llama, dtype=torch.float64)
    first, second, _ = sampled_groups(model)
    expected = expected_gradient(model, [first], baseline) / 2
    spec = make_spec(baseline=baseline)
    gradient = gradient_of_step(model, spec, [first, with_rewards(second, [0.7] * 4)])
    assert_same(gradient, expected)


def test_what_stands_in_the_padding_does_not_matter():
    groups = sampled_groups(seeded_model(llama))
    models = [seeded_model(llama), seeded_model(llama)]
    for pad_token_id, model in enumerate(models):
        PolicyUpdate(model, make_spec(), pad_token_id).step(groups, policy_version=9)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_dropout_is_off():
    model = FAMILIES["gpt2"]().train()
    PolicyUpdate(model, make_spec(), PAD)
    assert not any(module.training for module in model.modules())


def passes_with_gradient(model, spec, groups):
    """Gradient of a step, and the trajectories of each of its passes that keep a graph."""
    sizes = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(
        lambda _, inputs, output: sizes.append(len(inputs[0])) if output.requires_grad else None
    )
    update = GradientAccumulation(model, spec, PAD)
    batch = update.score(groups, policy_version=0)
    assert batch.is_accumulated
    return torch.cat([each.grad.flatten() for each in model.parameters()]), sizes


@pytest.mark.parametrize(
    ("method", "baseline"), [("grpo", "grpo"), ("opsm", "grpo"), ("sequenceTis", "groupMean")]
)
def test_a_loss_of_rewards_and_single_trajectories_is_gone_through_once(method, baseline):
    groups = sampled_groups(seeded_model(llama, dtype=torch.float64), group_size=4)
    found = {}
    for size in (12, 5):
        model = seeded_model(llama, dtype=torch.float64)
        spec = with_micro_batches(make_spec(method=method, baseline=baseline), size)
        passes = []
        model.get_input_embeddings().register_forward_hook(
            lambda _, inputs, __, passes=passes: passes.append(len(inputs[0]))
        )
        accumulation = GradientAccumulation(model, spec, PAD)
        passes.clear()
        scored = accumulation.score(groups, policy_version=0)
        assert sum(passes) == 12
        assert scored.is_accumulated
        found[size] = torch.cat([each.grad.flatten() for each in model.parameters()])
    assert_same(found[5], found[12])


@pytest.mark.parametrize("checkpoints", ["none", "layers"])
@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2 tied"])
def test_a_group_larger_than_a_micro_batch_is_gone_through_once(family, checkpoints):
    groups = sampled_groups(seeded_model(FAMILIES[family], dtype=torch.float64), group_size=4)
    found = {}
    for size in (4, 3):
        model = seeded_model(FAMILIES[family], dtype=torch.float64)
        set_checkpoints(model, ActivationCheckpointing(checkpoints))
        spec = with_micro_batches(make_spec(baseline="opob"), size)
        found[size], sizes = passes_with_gradient(model, spec, groups)
        assert sum(sizes) == 12
        assert max(sizes) <= size
    assert_same(found[3], found[4])


def test_a_group_that_spreads_has_the_gradient_written_out_by_hand():
    model = seeded_model(llama, dtype=torch.float64)
    groups = sampled_groups(model, num_groups=2, group_size=5)
    expected = expected_gradient(model, groups, "opob")
    spec = with_micro_batches(make_spec(baseline="opob"), 2)
    assert_same(gradient_of_step(model, spec, groups), expected)


def test_a_gradient_that_does_not_get_into_the_parameters_is_named(monkeypatch):
    model = seeded_model(llama)
    monkeypatch.setattr(
        ParameterSums, "weighted_sums", lambda _, slots: [torch.zeros(each.shape) for each in slots]
    )
    monkeypatch.setattr(ParameterSums, "complete", lambda *_: None)
    with pytest.raises(LostGradientError, match=r"'model.embed_tokens.weight', .* and 18 more"):
        GradientAccumulation(model, make_spec(), PAD).score(sampled_groups(model), policy_version=0)


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
