import math
from dataclasses import replace

import pytest
import torch

from tests.unit.learner.estimator.batches import of_method, record_of, rows_of
from vcpo.algo.methods import LOSS_CONFIGS, Method
from vcpo_learner.estimator.clipping import clip_factors
from vcpo_learner.estimator.loss import token_coefficients


def factors(method, record, advantages):
    per_token = record.spread(torch.tensor(advantages, dtype=torch.float64))
    return clip_factors(record, per_token, LOSS_CONFIGS[Method(method)])


def test_m2po_lets_go_of_the_token_that_was_pushed_furthest():
    # Tokens of six trajectories, advantages + + + - + -.
    rows = [[0.05], [-0.02], [0.6], [-0.3], [0.1], [-0.05]]
    found = factors("m2po", record_of(rows), [1.0, 1.0, 1.0, -1.0, 1.0, -1.0])
    assert found.tolist() == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]


def test_opsm_drops_negative_sequences_that_the_learner_left_behind():
    # Mean log mu/pi of .15 is above .1 with A < 0; with A > 0 nothing is dropped.
    record = record_of([[-0.15, -0.15], [-0.15, -0.15], [-0.05, -0.05]])
    found = factors("opsm", record, [-1.0, 1.0, -1.0])
    assert rows_of(record, found) == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def test_a_proximal_clip_is_off_at_lag_zero_and_widens_with_the_lag():
    # log u = .3: at lag 1 the ratio is u = 1.35, at lag 3 its cube root 1.105.
    far = record_of([[0.3]], lag=1)
    assert factors("a3po", far, [1.0]).item() == 0.0
    for lag in (0, 3):
        record = replace(far, lags=torch.full_like(far.lags, lag))
        assert factors("a3po", record, [1.0]).item() == 1.0


def test_bapo_widens_the_band_for_positive_tokens():
    # Ratio 1.3 up, alone with a negative of 1: clipped at 1.2, back in at 1.3 for a share above 0.
    record = record_of([[math.log(1.29)], [0.0]])
    assert factors("bapo", record, [1.0, -1.0])[0].item() == 1.0
    assert factors("grpo", record, [1.0, -1.0])[0].item() == 0.0


def test_stapo_silences_improbable_tokens_that_the_policy_was_sure_about():
    # Four tokens with A > 0 and pi < .002; entropies .1, .4, .9, 2: the 75 % quantile is 1.175.
    record = record_of([[0.0]] * 4, mu=math.log(1e-3), entropies=[[0.1], [0.4], [0.9], [2.0]])
    assert (factors("stapo", record, [1.0] * 4) > 0).tolist() == [False] * 3 + [True]


def test_stapos_mean_is_over_the_tokens_that_survive():
    record = record_of([[0.0]] * 4, mu=math.log(1e-3), entropies=[[0.1], [0.4], [0.9], [2.0]])
    assert of_method("stapo", record, [1.0] * 4).sum().item() == pytest.approx(-1.0)


def test_stapos_share_of_surviving_tokens_is_exact_in_float64():
    # Of two suspects, entropies .1 and .9, the first is below their 75 % quantile of .7: three of
    # four tokens survive, so each counts 4/3.
    record = record_of([[0.0]] * 4, mu=math.log(1e-3), entropies=[[0.1], [0.9], [0.5], [0.5]])
    found = factors("stapo", record, [1.0, 1.0, -1.0, -1.0])
    assert found.tolist() == [0.0, 4 / 3, 4 / 3, 4 / 3]


def test_stapo_leaves_improbable_tokens_of_bad_responses_alone():
    record = record_of([[0.0]] * 2, mu=math.log(1e-3), entropies=[[0.1], [2.0]])
    assert factors("stapo", record, [-1.0, -1.0]).tolist() == [1.0, 1.0]


def test_stapo_says_what_it_lacks():
    with pytest.raises(ValueError, match="entropies is None"):
        factors("stapo", record_of([[0.0]]), [1.0])


def test_the_share_of_tokens_without_gradient_is_reported():
    record = record_of([[0.5, 0.0, 0.0, 0.0]])
    found = token_coefficients(record, [1.0], LOSS_CONFIGS[Method.GRPO])
    assert found.masked_share == 0.25
