"""Losses and baselines of the user's own: what they are given, and what is said of wrong ones."""

import pytest
import torch

from tests.fixtures.learner.models import llama, sampled_groups, seeded_model
from tests.fixtures.learner.updates import gradient_of_step, make_spec, with_micro_batches
from tests.unit.learner.estimator.batches import random_batch
from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.methods import LOSS_CONFIGS, SURROGATE_LOSS, LossConfig
from vcpo.service.lifecycle import StartError
from vcpo_learner.estimator.loss import surrogate_coefficients, token_coefficients
from vcpo_learner.estimator.own_functions import loss_function
from vcpo_learner.estimator.trial import require_own_functions

OWN = "tests.fixtures.learner.own_losses"


def spec_with(**algorithm):
    return make_spec(**{"method": "grpo", "baseline": "grpo", **algorithm})


def refusal(**algorithm):
    with pytest.raises(StartError) as refused:
        require_own_functions(spec_with(**algorithm))
    return str(refused.value)


def test_the_shipped_methods_come_in_by_the_same_door():
    assert {config.loss for config in LOSS_CONFIGS.values()} == {SURROGATE_LOSS}
    assert loss_function(SURROGATE_LOSS) is surrogate_coefficients


@pytest.mark.parametrize("micro_batch", [64, 5], ids=["one micro-batch", "three micro-batches"])
def test_a_loss_written_as_grpo_has_the_gradient_of_grpo(micro_batch):
    groups = sampled_groups(seeded_model(llama, dtype=torch.float64))
    own, shipped = (
        gradient_of_step(
            seeded_model(llama, dtype=torch.float64),
            with_micro_batches(spec_with(**algorithm), micro_batch),
            groups,
        )
        for algorithm in ({"loss": f"{OWN}:written_grpo"}, {})
    )
    assert shipped.any()
    torch.testing.assert_close(own, shipped, rtol=1e-9, atol=1e-9 * float(shipped.norm()))


@pytest.mark.parametrize(
    ("own", "shipped"), [("written_mean", "groupMean"), ("written_opob", "opob")]
)
def test_a_baseline_written_as_a_shipped_one_has_its_gradient(own, shipped):
    groups = sampled_groups(seeded_model(llama, dtype=torch.float64))
    found, expected = (
        gradient_of_step(
            seeded_model(llama, dtype=torch.float64), make_spec(baseline=baseline), groups
        )
        for baseline in (f"{OWN}:{own}", shipped)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.norm()))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("a_tensor", "returned Tensor; it must return TokenCoefficients(values=...)"),
        ("one_number_each", "returned values of (5,); they must be a tensor of (15,), one for"),
        ("two_arguments", "must take (record, advantages, config), but too many positional"),
        ("no_number", "returned coefficients of trajectory 0 that add up to nan"),
        ("breaks", "raised KeyError: 'kl'"),
        ("at_random", "returned other numbers the second time"),
        ("absent", "cannot be imported (AttributeError: "),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_with_what_is_wrong(function, message):
    path = f"{OWN}:{function}"
    assert refusal(loss=path).startswith(f"spec.algorithm.loss: {path!r} {message}")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", "returned 2 numbers for 3 trajectories; it must return one for each"),
        ("infinite", "returned inf for trajectory 0; advantages must be finite"),
        (
            "of_the_prompt",
            "cannot be called: its parameter `prompt` is none of rewards, num_tokens",
        ),
        ("nothing", "returned None; it must return the advantage of each trajectory"),
        ("math", "is no function"),
    ],
)
def test_a_baseline_that_cannot_be_used_is_refused_with_what_is_wrong(function, message):
    path = f"{OWN}:{function}"
    assert refusal(baseline=path).startswith(f"spec.algorithm.baseline: {path!r} {message}")


def test_a_module_that_is_not_there_is_refused_with_the_cure():
    said = refusal(loss="no_such_package.losses:mine")
    assert said.startswith("spec.algorithm.loss: 'no_such_package.losses:mine' cannot be imported")
    assert "put its module beside the run's file, or install it" in said


def test_a_coefficient_that_is_no_number_skips_the_step():
    record, advantages = random_batch(0)
    with pytest.raises(NonFiniteWeightError, match=r"coefficients\[0\]"):
        token_coefficients(record, advantages, LossConfig(loss=f"{OWN}:no_number"))
