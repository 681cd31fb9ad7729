"""The example of a loss and a baseline outside the tree."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.fixtures.learner.models import llama, sampled_groups, seeded_model
from tests.fixtures.learner.updates import gradient_of_step, make_spec
from tests.unit.learner.estimator.batches import record_of
from vcpo.algo.methods import LossConfig

SOURCE = Path(__file__).parents[4] / "examples" / "plugins" / "loss"


@pytest.fixture(scope="module")
def package():
    """The module, found as if it were installed; `tests/integration` installs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SOURCE)
        yield import_module("soft_clip")


def test_a_token_counts_less_the_further_it_moved(package):
    # u exp(-(log u / .3)^2 / 2) over B T = 2: 1, then e^(.3 - .5) = .8187, then e^(-.6 - 2).
    record = record_of([[0.0, 0.3], [-0.6]])
    found = package.soft_clip(record, torch.tensor([1.0, -2.0]).double(), LossConfig())
    assert found.values.tolist() == pytest.approx(
        [-1.0 / 4, -0.8187307530779818 / 4, 2 * 0.07427357821433388 / 2]
    )
    assert found.masked_share == pytest.approx(1 / 3)


def test_the_baseline_weighs_rewards_by_lengths(package):
    assert package.length_weighted([1.0, 0.0], [3, 1]) == [0.25, -0.75]


def test_a_step_is_taken_with_both(package):
    model = seeded_model(llama, dtype=torch.float64)
    spec = make_spec(
        baseline="soft_clip:length_weighted", loss="soft_clip:soft_clip", method="grpo"
    )
    assert gradient_of_step(model, spec, sampled_groups(model)).any()
