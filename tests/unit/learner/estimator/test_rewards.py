from dataclasses import replace

import pytest
import torch

from tests.unit.learner.estimator.batches import record_of
from vcpo.algo.methods import LOSS_CONFIGS, Method
from vcpo_learner.estimator.loss import regularized_rewards, shaped_rewards, whiten

REWARDS = torch.tensor([1.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(16000, 0.0), (16384, 0.0), (18432, 0.5), (20480, 1.0)]
)
def test_the_penalty_of_long_responses_rises_over_the_last_part(num_tokens, expected):
    # 4096 of 20480 tokens, as DAPO has it.
    record = record_of([[0.0] * num_tokens, [0.0]], longest=20480)
    shaped = shaped_rewards(record, LOSS_CONFIGS[Method.DAPO])
    assert shaped.tolist() == pytest.approx([-expected, 0.0])


def test_without_a_part_no_response_is_too_long():
    record = record_of([[0.0] * 10], longest=10)
    assert shaped_rewards(record, LOSS_CONFIGS[Method.GRPO]).tolist() == [0.0]


def test_tbas_worked_example():
    # R = 1, 0; log pi = -10, -12; log ref = -10.5, -11; beta .5: KL terms of -.25 and .25 times
    # beta around their mean.
    record = record_of([[0.0], [-2.0]], mu=-10.0, reference_logprobs=[[-10.5], [-11.0]])
    config = LOSS_CONFIGS[Method.TBA]
    shaped = regularized_rewards(REWARDS, record, _with_beta(config, 0.5))
    assert shaped.tolist() == pytest.approx([0.75, 0.5])
    assert ((shaped.mean() - shaped) / 0.5).tolist() == pytest.approx([-0.25, 0.25])


def test_agros_worked_example():
    # R = 1, 0, log ratios .5, -1, beta .5: .75 and .5, half the variance .0078.
    record = record_of([[0.5], [-1.0]], mu=0.0, reference_logprobs=[[0.0], [0.0]])
    shaped = regularized_rewards(REWARDS, record, _with_beta(LOSS_CONFIGS[Method.AGRO], 0.5))
    assert shaped.tolist() == pytest.approx([0.75, 0.5])
    assert 0.5 * shaped.var(correction=0).item() == pytest.approx(0.0078125)


def test_a_residual_says_what_it_lacks():
    with pytest.raises(ValueError, match="reference_logprobs is None"):
        regularized_rewards(REWARDS[:1], record_of([[0.0]]), LOSS_CONFIGS[Method.TBA])


def test_equal_values_are_whitened_to_zero():
    assert not whiten(torch.full((3,), 0.7)).any()


def _with_beta(config, beta):
    return replace(config, kl_coefficient=beta)
