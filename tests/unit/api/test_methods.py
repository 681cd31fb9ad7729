import pytest
from pydantic import ValidationError

from vcpo.algo.advantage import BaselineScope
from vcpo.algo.baseline import Baseline
from vcpo.algo.ess.learning_rate import LearningRateRule
from vcpo.algo.methods import LOSS_CONFIGS, Clipping, Method
from vcpo.api.algorithm import Algorithm
from vcpo.api.errors import problems_of


def algorithm(**fields):
    return Algorithm.model_validate(fields)


def refusal(**fields):
    with pytest.raises(ValidationError) as caught:
        algorithm(**fields)
    (problem,) = problems_of(caught.value)
    return str(problem)


@pytest.mark.parametrize("method", list(Method))
def test_a_method_is_one_word(method):
    assert algorithm(method=method.value).loss_config == LOSS_CONFIGS[method]


def test_what_is_given_replaces_the_methods_own():
    config = algorithm(
        method="grpo", baseline="opob", settings={"clipHigh": 0.28}, learningRateRule="sqrt"
    ).loss_config
    assert (config.baseline, config.clip_low, config.clip_high) == (Baseline.OPOB, 0.2, 0.28)
    assert config.learning_rate_rule is LearningRateRule.SQRT
    assert config.clipping is Clipping.CLIP


def test_a_number_that_the_method_does_not_read_is_refused_with_those_that_it_does():
    assert refusal(method="cispo", settings={"klCoefficient": 0.1}) == (
        "settings.klCoefficient: method 'cispo' does not read it; remove it or use weightCap,"
        " weightFloor, overlongShare (got 0.1)"
    )
    assert refusal(settings={"clipHihg": 0.1}).startswith("settings.clipHihg: method 'vcpo2'")


def test_a_number_out_of_range_is_refused_with_the_range():
    assert refusal(method="grpo", settings={"clipLow": 1.5}) == (
        "settings.clipLow: must be from 0 to 1 (got 1.5)"
    )


@pytest.mark.parametrize("method", ["tba", "agro", "kimi", "vtrace"])
def test_a_method_with_a_fixed_baseline_refuses_another(method):
    assert "always uses" in refusal(method=method, baseline="opob")


def test_a_loss_of_the_users_own_takes_the_numbers_of_the_method():
    config = algorithm(
        method="grpo", loss="mine.losses:soft", settings={"clipHigh": 0.3}
    ).loss_config
    assert (config.loss, config.clip_high, config.is_shipped) == ("mine.losses:soft", 0.3, False)


@pytest.mark.parametrize("path", ["soft", "mine:", ":soft", "mine.1:soft", "mine:soft()"])
def test_a_loss_is_named_by_module_and_function(path):
    assert refusal(loss=path) == (
        "loss: must be package.module:function; remove it for the loss of the method"
        f" (got {path!r})"
    )


def test_a_baseline_of_the_users_own_spans_the_group_or_the_batch():
    assert algorithm(baseline="mine:b").loss_config.baseline_scope is BaselineScope.GROUP
    config = algorithm(baseline="mine:b", baselineScope="batch")
    assert config.loss_config.baseline_scope is BaselineScope.BATCH


def test_limits_of_a_step_come_from_the_spec():
    limits = algorithm(deadBand=0.25, refuseBelow=0.1).step_limits
    assert (limits.dead_band, limits.refuse_below) == (0.25, 0.1)


def test_the_trust_region_has_the_horizon_of_the_largest_lag_and_the_target_of_the_spec():
    region = algorithm(
        learningRateRule="trustRegion", maxPolicyLagSteps=48, targetEssRatio=0.6
    ).trust_region
    assert region is not None
    assert (region.horizon_steps, region.target_ess_ratio) == (48, 0.6)
    assert algorithm(learningRateRule="sqrt").trust_region is None


def test_only_the_rule_of_the_region_damps_below_a_target():
    fields = {"learningRateRule": "trustRegion", "targetEssRatio": 0.5}
    assert algorithm(**fields).step_limits.target_ess_ratio == 0.5
    assert algorithm(learningRateRule="sqrt").step_limits.target_ess_ratio == 1.0


def test_a_target_is_refused_under_a_rule_that_has_none():
    assert refusal(learningRateRule="sqrt", targetEssRatio=0.5) == (
        "targetEssRatio: rule 'sqrt' does not use it; use learningRateRule 'trustRegion' (got 0.5)"
    )
