"""What each rank of a mesh runs, with real trajectories."""

import io
import json
import logging
import math
from dataclasses import astuple, replace
from itertools import chain, islice
from random import Random

import numpy as np
import pytest
import torch
from torch import nn

from tests.fixtures.families import family
from tests.fixtures.fleets import NOISE, VARIANCE, calibrations
from tests.fixtures.learner.dispatcher import make_trajectory
from tests.fixtures.learner.models import PAD, llama, sampled_groups, seeded_model
from tests.fixtures.learner.updates import make_spec, with_micro_batches
from vcpo.algo.ess.calibration import MismatchCalibration, MismatchEstimate
from vcpo.algo.ess.importance_weights import WeightMoments, ess_ratio
from vcpo.algo.ess.unit import near_equal_blocks
from vcpo.algo.health.diagnostics import TokenSums
from vcpo.algo.health.early_warning import StepHealth, WarningLevel
from vcpo.algo.health.guards import RateBackoff, RollbackNeed, Rollbacks
from vcpo.api.algorithm import Algorithm, RowLayout
from vcpo.api.workloads import Health, Precision
from vcpo.service.lifecycle import StartError
from vcpo.service.rotary_table import fix_rotary_table
from vcpo.wire.trajectory import VersionSpan
from vcpo_learner.forward import attention
from vcpo_learner.forward.token_batch import BatchTokens, batch_tokens
from vcpo_learner.output_head.logit_tiles import TiledLogits
from vcpo_learner.per_sample_gradients import factors
from vcpo_learner.schedule.micro_steps import MeshPlace
from vcpo_learner.schedule.token_budget import MemoryBudget
from vcpo_learner.update import gradient
from vcpo_learner.update.batch_decision import (
    batch_ess_unit,
    batch_moments,
    block_moments,
    decide_step,
    token_sums,
)
from vcpo_learner.update.fresh_tokens import fresh_blocks
from vcpo_learner.update.micro_batches import MicroBatchRunner
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.update.result import BatchSummary
from vcpo_learner.update.run_health import RunHealth
from vcpo_learner.update.token_inputs import LEARNING_RATE, Critic


def rows():
    random = Random(0)
    return [[random.gauss(0.0, 1.0) for _ in range(length)] for length in (1, 7, 12)]


def log_ratios():
    return torch.tensor(list(chain.from_iterable(rows())), dtype=torch.float64)


def close(found, expected):
    return astuple(found) == pytest.approx(astuple(expected), rel=1e-12)


def test_sums_over_tokens_are_those_of_plain_numbers():
    found = token_sums(log_ratios())
    expected = TokenSums.of([each for row in rows() for each in row])
    assert close(found.weights, expected.weights)
    assert found.k3_sum == pytest.approx(expected.k3_sum, rel=1e-12)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_moments_of_blocks_are_those_of_plain_numbers(size):
    blocks = [near_equal_blocks(len(row), size) for row in rows()]
    tokens = chain.from_iterable(rows())
    logs = [math.fsum(islice(tokens, each)) for each in chain.from_iterable(blocks)]
    assert close(block_moments(log_ratios(), blocks), WeightMoments.of(logs))


CPU = torch.device("cpu")
ON_POLICY = [torch.zeros(2)]
STATES = [torch.tensor([[1.0, 3.0], [1.0, -1.0]])]
"""One response of two tokens, two features each."""


def as_lists(advantages):
    return [row.tolist() for row in advantages]


def weights(critic):
    head = critic.state_dict()["head"]
    return head["weight"].flatten().tolist(), head["bias"].item()


def fit_critic(steps, *, states, rewards):
    """A critic that saw the same responses of one token each, on policy, this many times."""
    critic = Critic(states[0].shape[1], CPU)
    for _ in range(steps):
        critic.advantages(states, [torch.zeros(1)] * len(states), rewards)
    return critic


def test_before_it_learned_every_token_of_a_response_is_worth_its_reward():
    assert as_lists(Critic(2, CPU).advantages(STATES, ON_POLICY, [0.75])) == [[0.75, 0.75]]


def test_a_token_half_as_likely_as_when_it_was_sampled_counts_half():
    log_ratios = [torch.tensor([1.0, 0.5], dtype=torch.float64).log()]
    found = Critic(2, CPU).advantages(STATES, log_ratios, [1.0])
    assert as_lists(found) == [pytest.approx([0.5, 0.5])]


def test_its_first_step_goes_up_where_the_features_go_with_the_targets():
    # The gradient is -mean(target * feature): -(1 + 1) / 2, -(3 - 1) / 2 and -1 for the bias;
    # Adam's first step has the size of the learning rate in each.
    critic = Critic(2, CPU)
    critic.advantages(STATES, ON_POLICY, [1.0])
    weight, bias = weights(critic)
    assert [*weight, bias] == pytest.approx([LEARNING_RATE] * 3, rel=1e-4)


def test_advantages_are_those_of_the_head_before_the_step():
    critic = Critic(2, CPU)
    critic.advantages(STATES, ON_POLICY, [1.0])
    # V = lr * (1 + 3 + 1) and lr * (1 - 1 + 1); on policy the advantage is the reward less V.
    (found,) = critic.advantages(STATES, ON_POLICY, [1.0])
    assert found.tolist() == pytest.approx([1.0 - 5 * LEARNING_RATE, 1.0 - LEARNING_RATE], rel=1e-6)


def test_a_reward_that_the_states_foretell_is_no_advantage():
    states = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    critic = fit_critic(2000, states=states, rewards=[1.0, 0.0])
    (good,), (bad,) = critic.advantages(states, [torch.zeros(1)] * 2, [1.0, 0.0])
    assert abs(good) < 0.05
    assert abs(bad) < 0.05


def test_a_restored_critic_continues_like_the_saved_one():
    critic = Critic(2, CPU)
    critic.advantages(STATES, ON_POLICY, [1.0])
    file = io.BytesIO()
    torch.save(critic.state_dict(), file)
    file.seek(0)
    restored = Critic(2, CPU)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for each in (critic, restored):
        each.advantages(STATES, ON_POLICY, [0.5])
    assert weights(restored) == weights(critic)


def bfloat16_spec(layout=RowLayout.PADDED):
    spec = make_spec()
    return spec.model_copy(
        update={
            "learner": spec.learner.model_copy(update={"precision": Precision.BFLOAT16}),
            "batch": spec.batch.model_copy(update={"row_layout": layout}),
        }
    )


class FailingInBfloat16(nn.Module):
    """A policy with a kernel that a GPU's branch would call: it fails for numbers of 16 bits."""

    def __init__(self):
        super().__init__()
        self.model = seeded_model(llama)

    def forward(self, **inputs):
        output = self.model(**inputs)
        if output.logits.dtype is torch.bfloat16:
            raise TypeError("varlen_attn() got an unexpected keyword argument 'enable_gqa'")
        return output


def test_what_fails_in_the_number_type_of_the_step_fails_at_the_start():
    MicroBatchRunner(FailingInBfloat16(), make_spec(), PAD)
    with pytest.raises(TypeError, match="enable_gqa"):
        MicroBatchRunner(FailingInBfloat16(), bfloat16_spec(), PAD)


def test_tiles_that_fail_in_the_number_type_of_the_step_are_not_used(monkeypatch, caplog):
    own = TiledLogits.product

    def product(self, left, right, out=None):
        if self.input_dtype is torch.bfloat16:
            raise RuntimeError("out_dtype is not supported")
        return own(self, left, right, out)

    monkeypatch.setattr(TiledLogits, "product", product)
    with caplog.at_level(logging.WARNING):
        runner = MicroBatchRunner(seeded_model(llama), bfloat16_spec(), PAD)
    assert not runner.network.is_tiled
    assert "full logits are computed" in caplog.text


def test_norms_that_fail_in_the_number_type_of_the_step_are_refused_at_the_start(monkeypatch):
    def product(first, second):
        if first.dtype is torch.bfloat16:
            raise RuntimeError("out_dtype is not supported")
        return factors.product(first, second.mT)

    monkeypatch.setattr(factors, "token_products", product)
    PolicyUpdate(seeded_model(llama), make_spec(), PAD)
    with pytest.raises(StartError, match=r"cannot be measured \(out_dtype is not supported"):
        PolicyUpdate(seeded_model(llama), bfloat16_spec(), PAD)


@pytest.mark.parametrize("layout", [RowLayout.PADDED, RowLayout.PACKED])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_families_pass_in_bfloat16(kind, layout):
    model = family(kind)
    fix_rotary_table(model)
    MicroBatchRunner(model, bfloat16_spec(layout), PAD)


def each_alone(flat, ends, _, scoring):
    """What the kernel of a GPU computes, of queries, keys and values [tokens, heads, size]."""
    parts = (
        attention._causal(*(part.transpose(0, 1)[None] for part in each), scoring)
        for each in zip(*(torch.split(each, ends.diff().tolist()) for each in flat), strict=True)
    )
    return torch.cat([each[0].transpose(0, 1) for each in parts])


@pytest.mark.parametrize(
    ("kind", "takes_rows", "said"),
    [
        ("llama", True, "packed"),
        ("llama", False, "padded (no kernel of this device takes packed ones)"),
        ("bloom", True, "padded (spec.batch.rowLayout: packed, but BloomForCausalLM gives"),
        ("gemma3", True, "padded (spec.algorithm.baseline: gradient norms of Gemma3"),
    ],
)
def test_auto_packs_rows_that_a_kernel_takes_if_all_checks_pass(
    monkeypatch, caplog, kind, takes_rows, said
):
    monkeypatch.setattr(gradient, "has_kernel", lambda _: True)
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: takes_rows)
    monkeypatch.setattr(attention, "_by_kernel", each_alone)
    model = family(kind)
    before = model.config._attn_implementation
    with caplog.at_level(logging.INFO, logger=gradient.__name__):
        update = PolicyUpdate(model, make_spec(), PAD)
    (line,) = [each.message for each in caplog.records if each.name == gradient.__name__]
    assert line.startswith(f"spec.batch.rowLayout: auto, rows are {said}")
    packs = said == "packed"
    assert update._gradient.runner.packs is packs
    assert model.config._attn_implementation == (attention.NAME if packs else before)


def test_a_record_says_which_way_attention_took(monkeypatch):
    model = seeded_model(llama)
    groups = sampled_groups(model)
    plain = PolicyUpdate(seeded_model(llama), make_spec(), PAD)
    assert plain.step(groups, policy_version=9).attention_calls == {}
    packed = PolicyUpdate(model, bfloat16_spec(RowLayout.PACKED), PAD)
    assert set(packed.step(groups, policy_version=9).attention_calls) == {"one_by_one"}
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "_by_kernel", lambda flat, *_: flat[0])
    calls = packed.step(groups, policy_version=9).attention_calls
    assert calls == {"kernel": len(model.model.layers)}


STEPS_TO_CRITICAL = 5
"""The first step with a level."""


def spec(**health):
    return make_spec().model_copy(update={"health": Health.model_validate(health)})


def critical_health(**settings):
    health = RunHealth(spec(**settings))
    for _ in range(STEPS_TO_CRITICAL):
        health.observe_refusal({"w": [1.0]})
    return health


def collapsed_health(**settings):
    """Ten steps at a reward of 1, and ten at 0."""
    health = RunHealth(spec(**settings))
    for reward in [1.0] * 10 + [0.0] * 10:
        health._observe(StepHealth(relative_ess=1.0), {"w": [reward] * 8})
    return health


def test_a_run_that_gets_critical_goes_on_at_half_its_rate():
    health = RunHealth(spec())
    factors = []
    for _ in range(STEPS_TO_CRITICAL):
        health.observe_refusal({"w": [1.0]})
        factors.append(health.backoff.factor)
    assert health.level is WarningLevel.CRITICAL
    assert factors == [1.0, 1.0, 1.0, 1.0, 0.5]


def test_the_spec_may_keep_the_rate():
    health = critical_health(enabled=False)
    assert (health.level, health.backoff.factor) == (WarningLevel.CRITICAL, 1.0)


def test_a_restored_run_is_as_critical_and_as_slow_as_before():
    health, restored = critical_health(), RunHealth(spec())
    restored.load_state_dict(json.loads(json.dumps(health.state_dict())))
    assert (restored.level, restored.score) == (health.level, health.score)
    assert restored.backoff == health.backoff == RateBackoff(factor=0.5, age_steps=0)


def test_a_run_that_resumes_with_a_spec_that_keeps_the_rate_has_its_whole_rate_again():
    health = RunHealth(spec(enabled=False))
    health.load_state_dict(critical_health().state_dict())
    assert (health.level, health.backoff.factor) == (WarningLevel.CRITICAL, 1.0)


def test_a_run_whose_rewards_collapsed_needs_a_rollback():
    health = collapsed_health()
    assert (health.level, health.rollback_need) == (WarningLevel.OK, RollbackNeed.DUE)
    assert not health.is_good
    assert collapsed_health(enabled=False).rollback_need is RollbackNeed.NONE


def test_a_run_that_goes_back_has_the_warning_of_then_and_a_lower_rate_than_now():
    good, bad = RunHealth(spec()), critical_health()
    good._observe(StepHealth(relative_ess=0.9), {"w": [1.0]})
    saved = json.loads(json.dumps(good.state_dict()))
    bad.backoff = RateBackoff(factor=0.25, age_steps=3)
    bad.load_state_dict(bad.rolled_back_state(saved, version=40))
    assert (bad.level, bad.rewards) == (WarningLevel.OK, good.rewards)
    assert bad.backoff == RateBackoff(factor=0.125, ceiling=0.125, age_steps=0)
    assert bad.rollbacks == Rollbacks(number=1, version=40)
    assert bad.is_good


LOWEST, HIGHEST = -100.0, 1e-3
"""Log-probabilities that a submission may have."""


def scale_of(calibration, log_ratios):
    """The published scale of a batch of whole trajectories, [B, tokens] log ratios."""
    settings = Algorithm.model_validate({"method": "vcpo"})
    size, length = log_ratios.shape
    batch = BatchSummary(
        group_sizes=[size],
        num_tokens=[length] * size,
        rewards=[0.0] * size,
        log_weights=log_ratios.sum(1).tolist(),
        squared_norms=[1.0] * size,
    )
    unit = batch_ess_unit(batch, settings, calibration)
    moments = batch_moments(batch, torch.tensor(log_ratios.ravel()), unit)
    decided = decide_step(
        unit, moments, settings.step_limits, relative_error=calibration.relative_error
    )
    reading = decided.reading
    return min(1.0, math.sqrt(reading.ess_ratio / reading.on_policy_ess_ratio))


def honest(rng, shape, variance=VARIANCE):
    return rng.normal(-variance / 2, math.sqrt(variance), shape)


@pytest.mark.parametrize("tokens", [100, 4000])
@pytest.mark.parametrize("situation", [each for each in NOISE if each != "honest"])
def test_the_rate_beside_noisy_workers_is_that_of_honest_ones(situation, tokens):
    rng = np.random.default_rng(0)
    stale = honest(rng, (128, tokens), VARIANCE + 1.0 / tokens)
    true = MismatchCalibration(estimate=MismatchEstimate(variance_per_token=VARIANCE, count=10**6))
    allowed = scale_of(true, stale)
    *_, last = calibrations(situation, workers=16, tokens=tokens, steps=60, seed=1)
    assert 0.9 * allowed <= scale_of(last, stale) <= 1.1 * allowed < 1.0


def faulty(rng, shape, fault):
    """Log ratios of responses whose log-probabilities are no policy's."""
    learner = -rng.exponential(1.0, shape)
    match fault:
        case "low":
            rollout = learner - 0.1
        case "lower":
            rollout = learner - 10.0
        case "high":
            rollout = learner + 0.1
        case "temperature":
            rollout = learner * 2.0
        case "one huge":
            rollout = learner.copy()
            rollout[0] = LOWEST
        case "certain":
            rollout = np.full(shape, HIGHEST)
        case "impossible":
            learner[:, 0] = -math.inf
            rollout = np.full(shape, -1.0)
    return learner - np.clip(rollout, LOWEST, HIGHEST)


@pytest.mark.parametrize(
    "fault", ["low", "lower", "high", "temperature", "one huge", "certain", "impossible"]
)
@pytest.mark.parametrize(("num_honest", "num_bad"), [(3, 1), (1, 1), (4, 4)])
def test_the_rate_beside_workers_at_fault_is_about_the_published_one(num_honest, num_bad, fault):
    rng = np.random.default_rng(1)
    calibration = MismatchCalibration()
    one = replace(
        make_trajectory("lease", 0), version_spans=(VersionSpan(policy_version=3, num_tokens=64),)
    )
    for _ in range(30):
        rows = [(f"honest-{n}", honest(rng, (4, 64))) for n in range(num_honest)]
        rows += [(f"bad-{n}", faulty(rng, (4, 64), fault)) for n in range(num_bad)]
        responses = [replace(one, worker_id=name) for name, _ in rows for _ in range(4)]
        ratios = torch.tensor(np.concatenate([each.ravel() for _, each in rows]))
        blocks = fresh_blocks(responses, ratios, 3, torch.full_like(ratios, -1.0))
        calibration = calibration.observe(blocks)
    batch = honest(rng, (64, 64), VARIANCE + 5e-3)
    published = math.sqrt(ess_ratio(batch.sum(1).tolist()) / math.exp(-VARIANCE * 64))
    assert scale_of(calibration, batch) == pytest.approx(published, rel=0.02)


MODEL = seeded_model(llama)
TRAJECTORIES = list(chain.from_iterable(sampled_groups(MODEL)))
TOKENS = batch_tokens(TRAJECTORIES, torch.device("cpu"))
POSITIONS = range(len(TRAJECTORIES))
GROUPS = [POSITIONS[0:4], POSITIONS[4:8], POSITIONS[8:12]]


def runner(*, micro_batch=64, tokens=None, memory=None, **place):
    spec = with_micro_batches(make_spec(), micro_batch)
    batch = spec.batch.model_copy(update={"tokens_per_micro_batch": tokens})
    return MicroBatchRunner(
        MODEL, spec.model_copy(update={"batch": batch}), PAD, MeshPlace(**place), memory
    )


def on_every_rank(num_replicas, num_shards, **settings):
    return [
        runner(
            num_replicas=num_replicas,
            num_shards=num_shards,
            replica=replica,
            shard=shard,
            **settings,
        )
        for replica in range(num_replicas)
        for shard in range(num_shards)
    ]


def test_the_ranks_together_score_every_trajectory_once():
    expected = next(runner().split(TOKENS, POSITIONS))
    scored = dict(zip(expected.positions, runner().logprobs(expected.batch), strict=True))
    found = {}
    for each in on_every_rank(2, 2, micro_batch=2):
        for step in each.split(TOKENS, POSITIONS):
            rows = () if step.is_idle else each.logprobs(step.batch)
            for at, row in zip(step.positions, rows, strict=True):
                assert at not in found
                found[at] = row
    assert sorted(found) == list(POSITIONS)
    for at, row in found.items():
        torch.testing.assert_close(row, scored[at][: len(row)])
        assert not scored[at][len(row) :].any()


def test_each_rank_is_brought_what_it_runs_and_every_rank_knows(monkeypatch):
    noted = []
    monkeypatch.setattr(
        BatchTokens, "bring", lambda _, wanted: noted.append(list(map(set, wanted)))
    )
    ranks = on_every_rank(2, 2, micro_batch=1)
    for split, chosen in (("split", [2, 5, 7]), ("split_groups", GROUPS[:1])):
        steps = [list(getattr(each, split)(TOKENS, chosen)) for each in ranks]
        among = [2, 5, 7] if split == "split" else GROUPS[0]
        shortest = min(among, key=TOKENS.num_tokens.__getitem__)
        assert any(step.is_idle for own in steps for step in own)
        ran = [{at for step in own for at in step.positions or [shortest]} for own in steps]
        assert noted == [ran] * 4
        noted.clear()
    for step in chain.from_iterable(steps):
        assert list(chain.from_iterable(step.members)) == step.positions


def test_an_idle_rank_runs_the_shortest_trajectory_and_counts_it_nowhere():
    lengths = TOKENS.num_tokens
    steps = [next(each.split(TOKENS, [2, 5])) for each in on_every_rank(1, 3)]
    assert [step.is_idle for step in steps] == [False, False, True]
    idle = steps[-1]
    shortest = min([2, 5], key=lambda at: lengths[at])
    assert idle.batch.input_ids.tolist() == [TOKENS.token_ids[shortest].tolist()]
    assert list(idle.positions) == []
    logprobs = runner().logprobs(idle.batch)
    assert len(idle.select_trained(logprobs)) == 0
    assert not idle.place_trained(torch.ones(0)).any()
    assert idle.place_trained(torch.ones(0)).shape == logprobs.shape


def test_a_group_longer_than_the_budget_of_tokens_is_not_held_whole():
    tokens = sum(TOKENS.num_tokens[at] for at in GROUPS[0])
    assert not runner(tokens=tokens // 2).holds_each(TOKENS, GROUPS)
    assert runner(tokens=4 * max(TOKENS.num_tokens)).holds_each(TOKENS, GROUPS)
    steps = list(runner(tokens=tokens // 2).split_groups(TOKENS, [GROUPS[0]]))
    assert [step.is_last for step in steps] == [False] * (len(steps) - 1) + [True]
    assert len(steps) > 1


def test_free_memory_sets_what_the_spec_leaves_open():
    memory = MemoryBudget(tokens=1, groups=1)
    steps = list(runner(memory=memory).split(TOKENS, POSITIONS))
    assert [len(step.positions) for step in steps] == [1] * len(TRAJECTORIES)
    steps = list(runner(memory=memory, tokens=10**6).split_groups(TOKENS, GROUPS))
    assert sorted(list(step.numbers) for step in steps) == [[0], [1], [2]]


def test_only_a_cpu_bounds_the_trajectories_that_the_spec_leaves_open():
    positions = [0] * 100
    on_gpu = MemoryBudget(tokens=10**6, groups=1)
    sizes = [
        [len(step.positions) for step in each.split(TOKENS, positions)]
        for each in (runner(micro_batch=None), runner(micro_batch=None, memory=on_gpu))
    ]
    assert (max(sizes[0]), sizes[1]) == (64, [100])


@pytest.mark.parametrize(("tokens", "fits"), [(1, False), (None, True)])
def test_a_graph_is_kept_only_of_what_one_micro_batch_holds(tokens, fits):
    assert runner(tokens=tokens).fits_one(TOKENS, POSITIONS) is fits
    steps = list(runner(tokens=tokens).split(TOKENS, POSITIONS, whole=True))
    assert [list(step.positions) for step in steps] == [list(POSITIONS)]
