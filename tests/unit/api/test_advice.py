import pytest

from vcpo.algo.methods import LOSS_CONFIGS, Method
from vcpo.api.advice import algorithm_warnings, batch_warnings, rollout_warnings
from vcpo.api.algorithm import Algorithm, Batch
from vcpo.api.workloads import Model, RolloutGroup


def warnings(**fields):
    return algorithm_warnings(Algorithm.model_validate(fields))


def test_vcpo_as_it_is_needs_no_warning():
    assert warnings() == ()


QUIET = set(Method) - {Method.REINFORCE, Method.OPMD, Method.DAPO, Method.VTRACE}


@pytest.mark.parametrize("method", sorted(QUIET))
def test_a_method_with_its_own_settings_is_not_warned_about(method):
    assert warnings(method=method) == ()


@pytest.mark.parametrize("method", ["tba", "agro", "kimi"])
def test_the_rule_is_advised_against_beside_a_kl_penalty(method):
    (warning,) = warnings(method=method, learningRateRule="sqrt")
    assert "limits already" in warning


@pytest.mark.parametrize("method", ["gspo", "geometricMask"])
def test_the_rule_reads_another_ratio_than_a_geometric_method_uses(method):
    (warning,) = warnings(method=method, learningRateRule="sqrt")
    assert "geometric ratios" in warning


def test_the_rule_is_a_brake_only_where_the_gradient_holds_no_weights():
    (warning,) = warnings(method="topr", learningRateRule="linear")
    assert "'linear' reads importance weights" in warning


@pytest.mark.parametrize("method", ["grpo", "m2po", "bapo"])
def test_the_optimal_baseline_is_not_optimal_under_clipping(method):
    (warning,) = warnings(method=method, baseline="opob")
    assert "before the clipping" in warning


@pytest.mark.parametrize("method", ["reinforce", "opmd"])
def test_a_method_without_correction_is_warned_about_stale_data(method):
    (warning,) = warnings(method=method)
    assert "does not correct for stale data" in warning
    assert warnings(method=method, maxPolicyLagSteps=0) == ()


def test_a_filter_may_wait_for_ever():
    (warning,) = warnings(method="dapo")
    assert "no step is taken" in warning


def test_advice_covers_every_loss_config():
    assert all(isinstance(warnings(method=method), tuple) for method in LOSS_CONFIGS)


def about_batch(lag=8, **fields):
    algorithm = Algorithm.model_validate({"maxPolicyLagSteps": lag})
    return list(batch_warnings(Batch.model_validate(fields), algorithm))


def test_a_batch_as_it_is_needs_no_warning():
    assert about_batch() == []
    assert about_batch(overProvisionRatio=1.5) == []


def test_without_lag_no_partial_response_can_be_resumed():
    (warning,) = about_batch(lag=0, overProvisionRatio=1.5)
    assert "`maxPolicyLagSteps` 0" in warning


def batch_warning(**fields):
    (warning,) = batch_warnings(Batch.model_validate(fields), Algorithm())
    return warning


def test_a_micro_batch_above_the_batch_is_said_to_change_nothing():
    warning = batch_warning(promptsPerStep=4, trajectoriesPerPrompt=4, microBatchTrajectories=17)
    assert warning.startswith(
        "microBatchTrajectories 17 is more than the 16 trajectories of a step"
    )


@pytest.mark.parametrize("size", [{}, {"microBatchTrajectories": 16}])
def test_a_micro_batch_up_to_the_batch_or_not_given_needs_no_warning(size):
    batch = Batch.model_validate({"promptsPerStep": 4, "trajectoriesPerPrompt": 4, **size})
    assert list(batch_warnings(batch, Algorithm())) == []


@pytest.mark.parametrize(
    ("lora", "engine", "precision", "count"),
    [
        ({}, "vllm", "float32", 1),
        ({}, "vllm", "bfloat16", 0),
        ({}, "hf", "float32", 0),
        (None, "vllm", "float32", 0),
    ],
)
def test_a_precision_in_which_vllm_serves_no_adapters_on_a_gpu_is_warned_about(
    lora, engine, precision, count
):
    model = Model.model_validate({"name": "m", "lora": lora})
    group = RolloutGroup.model_validate({"name": "main", "engine": engine, "precision": precision})
    found = list(rollout_warnings(model, [group]))
    assert len(found) == count
    assert all(line.startswith("main: precision 'float32'") for line in found)
