import ast
import json
import math
import random
import runpy
import statistics
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.estimators import reference_parity
from vcpo import algo
from vcpo.algo.advantage import BaselineScope, advantages, batch_advantages, vtrace
from vcpo.algo.baseline import Baseline
from vcpo.algo.coverage import on_policy_mean_weight, policy_coverage
from vcpo.algo.ess.importance_weights import NonFiniteWeightError, ess_ratio
from vcpo.algo.ess.verdict import learning_rate_scale
from vcpo.torch import StepRule, opob_advantages, truncated_weights, vcpo2_advantages
from vcpo_rollout.weights.postprocess import NoiseSchedule


def test_a_second_derivation_finds_the_same_numbers() -> None:
    errors = reference_parity.compare(batches=30, seed=1)
    names = ["ess_ratio", "learning_rate_scale", "optimal_baseline", "region_target"]
    assert sorted(errors) == names
    assert max(errors.values()) < 1e-10


SOURCES = sorted(Path(algo.__file__).parent.rglob("*.py"))
PURE = {
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "inspect",
    "itertools",
    "math",
    "statistics",
    "types",
    "typing",
    "vcpo",
}


def imported_roots(source: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in plain | named}


def test_the_mathematics_imports_nothing_but_plain_python() -> None:
    # The law of finite batches is drawn; only the learner's process draws, and it has numpy.
    found = {source.name: imported_roots(source) - PURE for source in SOURCES}
    assert {name: roots for name, roots in found.items() if roots} == {"finite_batch.py": {"numpy"}}


def schedule(**changed):
    settings = {"initial_sigma": 1e-2, "final_sigma": 1e-4, "num_stages": 10, "total_steps": 100}
    return NoiseSchedule(**{**settings, **changed})


def test_the_worked_example():
    # Ten stages from 1e-2 to 1e-4: a factor of 10^(-1/4) each.
    expected = [0, 0.01, 0.00562, 0.00316, 0.00178, 0.001, 0.00056, 0.00032, 0.00018, 0.0001]
    found = [schedule().sigma(step) for step in range(0, 100, 10)]
    assert found == pytest.approx(expected, rel=2e-2)


@given(st.integers(0, 500), st.integers(1, 400), st.integers(3, 40))
def test_noise_stays_between_its_ends_and_never_rises_again(step, total_steps, num_stages):
    found = schedule(total_steps=total_steps, num_stages=num_stages)
    sigma, later = found.sigma(step), found.sigma(step + 1)
    assert sigma == 0.0 or 1e-4 * (1 - 1e-9) <= later <= sigma <= 1e-2


@pytest.mark.parametrize("log_weight", [math.nan, math.inf], ids=str)
def test_a_weight_that_is_no_number_never_gets_a_rate(log_weight: float) -> None:
    with pytest.raises(NonFiniteWeightError):
        learning_rate_scale(ess_ratio([0.0, log_weight]))
    with pytest.raises(ValueError, match="ess_ratio is nan"):
        learning_rate_scale(math.nan)


REWARDS = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
NORMS = torch.tensor([[3.0, 1.0], [2.0, 2.0]])


def make_optimizer(rate: float = 0.5) -> torch.optim.SGD:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=rate)


def position(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["params"][0].detach())


def test_weights_are_truncated_and_have_no_gradient():
    log_weights = torch.tensor([math.log(20.0), math.log(0.5)], requires_grad=True)
    weights = truncated_weights(log_weights)
    torch.testing.assert_close(weights, torch.tensor([8.0, 0.5]))
    assert not weights.requires_grad


def test_opob_weighs_each_prompts_rewards_by_squared_norms():
    # b* = 3 * 1 / (3 + 1) of the first prompt; equal rewards have no advantage.
    expected = torch.tensor([[0.25, -0.75], [0.0, 0.0]])
    torch.testing.assert_close(opob_advantages(REWARDS, NORMS), expected)


def test_vcpo2_has_one_baseline_for_the_batch_lowered_by_what_it_does_not_show():
    log_weights = torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]])
    # b* = 7 / 8 over the batch, C = 1/2 and min R = 0: the baseline is 7 / 16.
    expected = REWARDS - 7 / 16
    torch.testing.assert_close(vcpo2_advantages(REWARDS, NORMS, log_weights), expected)


def test_vcpo_steps_at_the_root_of_the_ess_ratio_and_restores_the_rate():
    optimizer = make_optimizer()
    rule = StepRule(optimizer, max_lag_steps=8, method="vcpo")
    # Weights 1 and 0: ESS 1 of 2.
    report = rule.step(torch.tensor([0.0, -math.inf]), torch.tensor([3, 3]))
    assert report.ess_ratio == 0.5
    assert report.rate == pytest.approx(0.5 * math.sqrt(0.5))
    assert position(optimizer) == pytest.approx(-report.rate)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_rule_continues_at_the_rate_that_a_saved_one_had_come_to():
    def train(rule, steps):
        stale = torch.tensor([0.0, 2.0, -2.0, 1.0]), torch.full((4,), 8), torch.tensor(0.45)
        return [rule.step(*stale).rate for _ in range(steps)]

    whole, saved, resumed = (
        StepRule(make_optimizer(), max_lag_steps=8, on_policy_ess_ratio=0.6) for _ in range(3)
    )
    rates, _ = train(whole, 60), train(saved, 40)
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert train(resumed, 20) == rates[40:]
    assert saved.state_dict()["surprisal_nats"] == pytest.approx(0.45)
    assert saved.state_dict()["means"][0]["mismatch_nats"] == pytest.approx(-math.log(0.6))


def test_vcpo2_starts_at_a_share_of_the_rate_and_doubles_while_data_stays_fresh():
    rule = StepRule(make_optimizer(), max_lag_steps=64)
    fresh = torch.zeros(4), torch.zeros(4)
    assert [rule.step(*fresh).scale * 64 for _ in range(3)] == [1.0, 2.0, 4.0]


def test_a_weight_without_a_value_is_refused_before_the_step():
    optimizer = make_optimizer()
    with pytest.raises(NonFiniteWeightError):
        StepRule(optimizer, max_lag_steps=1).step(torch.tensor([math.nan]), torch.tensor([0]))
    assert position(optimizer) == 0.0


def test_the_plain_loop_learns_its_task(capsys):
    torch.manual_seed(0)
    rewards = runpy.run_path("examples/plain_loop.py")["train"](80)
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.9
    assert capsys.readouterr().out.count("reward") == 4


log_weights = st.lists(st.floats(-50, 50), min_size=1, max_size=32)


def test_the_coverage_is_the_mean_weight() -> None:
    # (1/2 + 1 + 1/4 + 1/4) / 4
    assert policy_coverage([math.log(w) for w in (0.5, 1, 0.25, 0.25)], 8) == pytest.approx(0.5)


def test_weights_count_up_to_the_cap() -> None:
    # (2 + 0 + 0 + 0) / 4 with a cap of 2
    assert policy_coverage([50.0, -math.inf, -800.0, -math.inf], 2) == pytest.approx(0.5)


def test_what_the_mismatch_takes_does_not_count_as_missing() -> None:
    assert policy_coverage([math.log(0.6)] * 4, 8, on_policy_mean=0.8) == pytest.approx(0.75)


@given(log_weights, st.floats(1, 100))
def test_the_coverage_is_a_share(logs: list[float], cap: float) -> None:
    assert 0.0 <= policy_coverage(logs, cap) <= 1.0


@given(log_weights, st.floats(0, 20))
def test_probability_that_leaves_the_data_lowers_the_coverage(
    logs: list[float], nats: float
) -> None:
    assert policy_coverage([log - nats for log in logs], 8) <= policy_coverage(logs, 8)


def test_a_weight_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(NonFiniteWeightError, match=r"log_weights\[1\]"):
        policy_coverage([0.0, math.nan], 8)


@pytest.mark.parametrize(
    ("cap", "mean", "message"),
    [(0.0, 1.0, "cap is"), (math.inf, 1.0, "cap is"), (8.0, 0.0, "on_policy_mean is")],
)
def test_numbers_out_of_range_are_refused(cap: float, mean: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_coverage([0.0], cap, mean)


@pytest.mark.parametrize("variance", [0.5, 2.0, 8.0])
def test_the_mean_truncated_weight_is_that_of_drawn_weights(variance: float) -> None:
    drawn = random.Random(7)
    deviation = math.sqrt(variance)
    weights = [math.exp(drawn.gauss(-variance / 2, deviation)) for _ in range(400_000)]
    # A standard error of at most 0.0025: the truncated weights have a deviation below 1.6.
    expected = fmean(min(weight, 8.0) for weight in weights)
    assert on_policy_mean_weight([variance], 8) == pytest.approx(expected, abs=0.01)


@given(st.floats(0, 1e9), st.floats(1, 1e6))
def test_truncation_only_takes(variance: float, cap: float) -> None:
    assert 0.0 < on_policy_mean_weight([variance], cap) <= 1.0


EIGHT = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
with_a_baseline = [method for method in Baseline if method is not Baseline.NONE]
rewards_of_a_group = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


@pytest.mark.parametrize(
    ("baseline", "right", "wrong"),
    [
        (Baseline.GROUP_MEAN, 5 / 8, -3 / 8),
        (Baseline.RLOO, 5 / 7, -3 / 7),
        (Baseline.GRPO, math.sqrt(5 / 3), -math.sqrt(3 / 5)),
        (Baseline.NONE, 1.0, 0.0),
    ],
)
def test_three_right_responses_of_eight(baseline: Baseline, right: float, wrong: float) -> None:
    # mean 3/8, population variance 15/64: (5/8) / sqrt(15/64) = sqrt(25/15)
    expected = [right if reward else wrong for reward in EIGHT]
    assert advantages(EIGHT, baseline) == pytest.approx(expected, rel=1e-14)


def test_opob_measures_rewards_against_the_optimal_baseline() -> None:
    got = advantages([1, 0, 1, 0], Baseline.OPOB, squared_norms=[1, 0.25, 16, 16])
    b = 17 / 33.25
    assert got == pytest.approx([1 - b, -b, 1 - b, -b], rel=1e-14)


def test_pessimistic_measures_rewards_against_a_lowered_optimal_baseline() -> None:
    # b* = (1*1 + 1*3) / 2 = 2; half of the way to the least reward, 1, is 1.5.
    got = advantages([1, 3], Baseline.PESSIMISTIC, squared_norms=[1, 1], coverage=0.5)
    assert got == [-0.5, 1.5]


def test_each_group_has_its_own_coverage_and_a_batch_has_one() -> None:
    # b* = 2 in both groups and over both; the least reward is 1.
    groups, norms = [[1, 3], [1, 3]], [[1, 1], [1, 1]]
    own = batch_advantages(groups, Baseline.PESSIMISTIC, squared_norms=norms, coverages=[1.0, 0.5])
    assert own == [[-1.0, 1.0], [-0.5, 1.5]]
    scope = BaselineScope.BATCH
    shared = batch_advantages(
        groups, Baseline.PESSIMISTIC, scope, squared_norms=norms, coverages=[0.0]
    )
    assert shared == [[0.0, 2.0], [0.0, 2.0]]


def test_a_number_of_coverages_that_is_not_that_of_the_baselines_is_refused() -> None:
    with pytest.raises(ValueError, match="coverages has 2 entries: give 1, one for each baseline"):
        batch_advantages(
            [[1, 3], [1, 3]],
            Baseline.PESSIMISTIC,
            BaselineScope.BATCH,
            squared_norms=[[1, 1], [1, 1]],
            coverages=[1.0, 1.0],
        )


@pytest.mark.parametrize("baseline", with_a_baseline)
@given(reward=st.floats(-1e6, 1e6), norms=st.lists(st.floats(0, 1e6), min_size=2, max_size=9))
def test_equal_rewards_give_exactly_zero_advantage(
    baseline: Baseline, reward: float, norms: list[float]
) -> None:
    logs = [-3.0 * index for index in range(len(norms))]
    assert advantages([reward] * len(norms), baseline, norms, logs) == [0.0] * len(norms)


def test_without_a_baseline_the_advantage_is_the_reward() -> None:
    assert advantages([1.0, 1.0], Baseline.NONE) == [1.0, 1.0]


@given(rewards_of_a_group)
def test_rloo_compares_each_with_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [
        reward - statistics.fmean(rewards[:index] + rewards[index + 1 :])
        for index, reward in enumerate(rewards)
    ]
    assert advantages(rewards, Baseline.RLOO) == pytest.approx(expected, abs=1e-10)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=12).filter(lambda r: len(set(r)) > 1))
def test_grpo_advantages_have_mean_zero_and_spread_one(rewards: list[int]) -> None:
    got = advantages([float(reward) for reward in rewards], Baseline.GRPO)
    assert statistics.fmean(got) == pytest.approx(0.0, abs=1e-12)
    assert statistics.pstdev(got) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e-8, 1e150], ids=str)
def test_grpo_does_not_depend_on_the_size_of_rewards(scale: float) -> None:
    assert advantages([scale, 0.0], Baseline.GRPO) == pytest.approx([1.0, -1.0], rel=1e-12)


@given(rewards_of_a_group, st.floats(-100, 100))
def test_adding_a_constant_to_rewards_changes_no_advantage(
    rewards: list[float], shift: float
) -> None:
    norms = [1.0 + index for index in range(len(rewards))]
    moved = advantages([reward + shift for reward in rewards], Baseline.OPOB, norms)
    assert moved == pytest.approx(advantages(rewards, Baseline.OPOB, norms), abs=1e-10)


def test_rloo_refuses_a_group_without_others() -> None:
    with pytest.raises(ValueError, match="rloo needs at least 2"):
        advantages([1.0], Baseline.RLOO)


@pytest.mark.parametrize("baseline", Baseline)
def test_an_empty_group_is_refused(baseline: Baseline) -> None:
    with pytest.raises(ValueError, match="rewards is empty"):
        advantages([], baseline, [], [])


def test_a_method_names_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="squared_norms is None: baseline opob"):
        advantages([1.0, 0.0], Baseline.OPOB)


def test_each_group_has_its_own_baseline() -> None:
    got = batch_advantages([[1.0, 0.0], [5.0, 5.0, 8.0]], Baseline.GROUP_MEAN)
    assert got == [[0.5, -0.5], [-1.0, -1.0, 2.0]]


def test_group_scope_hands_each_group_its_own_norms() -> None:
    norms = [[3.0, 1.0], [1.0, 1.0]]
    got = batch_advantages([[1.0, 0.0], [1.0, 0.0]], Baseline.OPOB, squared_norms=norms)
    assert got == [[0.25, -0.75], [0.5, -0.5]]


def test_batch_scope_has_one_baseline_for_all() -> None:
    groups = [[1.0, 0.0], [0.0, 0.0, 4.0]]
    got = batch_advantages(groups, Baseline.GROUP_MEAN, BaselineScope.BATCH)
    assert got == [[0.0, -1.0], [-1.0, -1.0, 3.0]]


def test_batch_scope_weighs_all_groups_by_their_norms() -> None:
    # (3 * 1 + 1 * 4) / (3 + 1 + 2 + 1) = 1
    norms = [[3.0, 1.0], [2.0, 1.0]]
    got = batch_advantages([[1, 0], [0, 4]], Baseline.OPOB, BaselineScope.BATCH, norms)
    assert got == [[0.0, -1.0], [-1.0, 3.0]]


@pytest.mark.parametrize("baseline", [Baseline.RLOO, Baseline.GRPO, Baseline.NONE])
def test_a_method_of_groups_cannot_span_a_batch(baseline: Baseline) -> None:
    with pytest.raises(ValueError, match=f"baseline is {baseline.value} with scope batch"):
        batch_advantages([[1.0, 0.0]], baseline, BaselineScope.BATCH)


def test_numbers_that_belong_to_another_group_are_refused() -> None:
    norms = [[1.0], [1.0, 1.0, 1.0]]
    with pytest.raises(ValueError, match="squared_norms has groups of"):
        batch_advantages([[1.0, 0.0], [1.0, 0.0]], Baseline.OPOB, BaselineScope.BATCH, norms)


def test_a_batch_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="groups is empty"):
        batch_advantages([], Baseline.GROUP_MEAN)


finite = st.floats(-3.0, 3.0)


def test_the_worked_example_of_vtrace():
    # pi/mu = 2, .5, 1 cut at 1; r = 0, 0, 1; V = .2, .4, .6: delta = .2, .1, .4.
    found = vtrace([math.log(2.0), math.log(0.5), 0.0], [0.0, 0.0, 1.0], [0.2, 0.4, 0.6])
    assert found.targets == pytest.approx((0.7, 0.7, 1.0))
    assert found.advantages == pytest.approx((0.5, 0.3, 0.4))


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=8))
def test_on_policy_a_target_of_vtrace_is_the_sum_of_the_rewards_to_come(rows):
    rewards, values = zip(*rows, strict=True)
    found = vtrace([0.0] * len(rows), rewards, values)
    sums = [math.fsum(rewards[t:]) for t in range(len(rows))]
    assert found.targets == pytest.approx(sums, abs=1e-9)
    gaps = [total - value for total, value in zip(sums, values, strict=True)]
    assert found.advantages == pytest.approx(gaps, abs=1e-9)


def test_a_token_that_the_learner_rules_out_ends_the_trace():
    found = vtrace([0.0, -math.inf], [0.0, 1.0], [0.5, 0.25])
    assert found.targets == (0.25, 0.25)
    assert found.advantages == (-0.25, 0.0)


def test_vtrace_caps_ratios_of_any_size():
    assert vtrace([1e4, -1e4], [1.0, 1.0], [0.0, 0.0]).advantages == (1.0, 0.0)


@pytest.mark.parametrize("log_ratio", [math.nan, math.inf])
def test_vtrace_refuses_a_ratio_that_is_no_number(log_ratio):
    with pytest.raises(NonFiniteWeightError, match=r"log_ratios\[0\]"):
        vtrace([log_ratio], [0.0], [0.0])


def test_vtrace_refuses_rows_of_different_length():
    with pytest.raises(ValueError, match="2, 1 and 2 entries"):
        vtrace([0.0, 0.0], [1.0], [0.0, 0.0])


@pytest.mark.parametrize(("rewards", "values"), [([math.nan], [0.0]), ([0.0], [math.nan])])
def test_vtrace_refuses_a_reward_or_value_that_is_no_number(rewards, values):
    with pytest.raises(NonFiniteWeightError):
        vtrace([0.0], rewards, values)
