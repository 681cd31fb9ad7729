"""Lists, numpy arrays and tensors of the same numbers give the same result."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vcpo.algo.advantage import BaselineScope, advantages, batch_advantages, vtrace
from vcpo.algo.baseline import Baseline, mean_baseline, optimal_baseline
from vcpo.algo.ess.calibration import MismatchCalibration, MismatchEstimate
from vcpo.algo.ess.finite_batch import finite_batch_law
from vcpo.algo.ess.importance_weights import (
    WeightMoments,
    effective_sample_size,
    ess_ratio,
    log_sum_exp,
)
from vcpo.algo.ess.unit import EssKind, ess_unit, near_equal_blocks
from vcpo.algo.ess.verdict import (
    LearningRateRule,
    StepLimits,
    StepVerdict,
    judge_step,
    learning_rate_scale,
)
from vcpo.algo.health.diagnostics import TokenSums, diagnose

# All of these are exact in bfloat16.
REWARDS = [1.0, 0.0, 0.5, -2.0]
NORMS = [1.0, 0.25, 16.0, 4.0]
LOG_WEIGHTS = [0.0, -0.5, 0.75, 1.5]
LENGTHS = [3, 1, 2, 4]

HOLDERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "numpy": np.array,
    "numpy float32": lambda values: np.array(values, dtype=np.float32),
    "list of numpy scalars": lambda values: [np.float32(value) for value in values],
    "tensor": torch.tensor,
    "bfloat16 tensor": lambda values: torch.tensor(values, dtype=torch.bfloat16),
    "tensor with a gradient": lambda values: torch.tensor(
        [float(value) for value in values], requires_grad=True
    ),
    "list of tensors": lambda values: [torch.tensor(value) for value in values],
}
held_in = pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())

OF_VECTORS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "advantages": lambda hold: advantages(
        hold(REWARDS), Baseline.OPOB, hold(NORMS), hold(LOG_WEIGHTS)
    ),
    "diagnose": lambda hold: diagnose(hold(LOG_WEIGHTS), TokenSums.of(hold(LOG_WEIGHTS))),
    "effective_sample_size": lambda hold: effective_sample_size(hold(LOG_WEIGHTS)),
    "ess_ratio": lambda hold: ess_ratio(hold(LOG_WEIGHTS)),
    "ess_unit": lambda hold: ess_unit(EssKind.BLOCK, hold(LENGTHS), 0.125),
    "log_sum_exp": lambda hold: log_sum_exp(hold(LOG_WEIGHTS)),
    "mean_baseline": lambda hold: mean_baseline(hold(REWARDS)),
    "MismatchCalibration": lambda hold: MismatchCalibration(
        estimate=MismatchEstimate(variance_per_token=1e-3, count=16)
    ).on_policy_ess_ratio(hold(LENGTHS)),
    "optimal_baseline": lambda hold: optimal_baseline(hold(REWARDS), hold(NORMS)),
    "vtrace": lambda hold: vtrace(hold(LOG_WEIGHTS), hold(REWARDS), hold(NORMS)),
    "WeightMoments.of": lambda hold: WeightMoments.of(hold(LOG_WEIGHTS)),
}


@held_in
@pytest.mark.parametrize("function", OF_VECTORS.values(), ids=OF_VECTORS.keys())
def test_the_kind_of_array_does_not_change_the_answer(function, hold):
    assert function(hold) == function(list)


@pytest.mark.parametrize("one", [np.float32, np.array, torch.tensor], ids=lambda one: one.__name__)
def test_a_number_may_be_an_array_of_no_dimension(one):
    scale = learning_rate_scale(one(0.25), one(0.5), LearningRateRule.LINEAR)
    assert (type(scale), scale) == (float, 0.5)
    assert near_equal_blocks(one(7), one(3)) == (4, 3)
    law = finite_batch_law(one(0.25), one(8))
    assert (type(law.bias), type(law.deviation)) == (float, float)
    assert law == finite_batch_law(0.25, 8)
    verdict = judge_step(one(0.25), one(1.0), StepLimits(), kl_per_token=one(0.5))
    assert verdict == StepVerdict(scale=0.5)


@pytest.mark.parametrize("hold", [np.array, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("scope", BaselineScope)
def test_a_batch_may_be_an_array_of_two_dimensions(hold, scope):
    rewards, norms = [REWARDS[:2], REWARDS[2:]], [NORMS[:2], NORMS[2:]]
    plain = batch_advantages(rewards, Baseline.OPOB, scope, norms)
    assert batch_advantages(hold(rewards), Baseline.OPOB, scope, hold(norms)) == plain


def test_a_float32_reward_keeps_its_exact_value():
    tenth = np.float32(0.1)
    assert mean_baseline(torch.tensor([0.1, 0.1])) == float(tenth) != 0.1
    assert advantages(torch.tensor([0.1] * 3), Baseline.GRPO) == [0.0] * 3


@pytest.mark.parametrize("hold", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_rows_where_one_dimension_is_due_are_refused_by_name(hold):
    with pytest.raises(ValueError, match="rewards is of 2 dimensions: give one dimension"):
        advantages(hold([[1.0, 0.0]]), Baseline.GROUP_MEAN)


def test_a_length_is_a_whole_number():
    with pytest.raises(ValueError, match=r"num_tokens\[0\] is 2.5: give a whole number"):
        ess_unit(EssKind.TOKEN, torch.tensor([2.5]), None)
