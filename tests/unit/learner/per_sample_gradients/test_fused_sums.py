"""The kernel that adds and squares gradients at once, against PyTorch.

On a GPU, where PyTorch brings Triton, or in Triton's interpreter. Triton takes a gigabyte, and no
CPU needs it: `pip install --target FOLDER triton`, and then with PYTHONPATH=FOLDER and
TRITON_INTERPRET=1 nothing is skipped here.
"""

import os
import sys

import pytest
import torch

from tests.fixtures.learner.models import llama, mixtral, sampled_groups, seeded_model
from tests.fixtures.learner.updates import gradient_of_step, make_spec, with_micro_batches
from vcpo_learner.per_sample_gradients import measurement, weighted_sum

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"
)
"""Triton's interpreter does so, and NumPy warns of it."""
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
MODULE = "vcpo_learner.per_sample_gradients.fused_sums"


@pytest.fixture(scope="module")
def add_and_square():
    if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU; or Triton, which no CPU needs, and TRITON_INTERPRET=1")
    from vcpo_learner.per_sample_gradients.fused_sums import add_and_square

    return add_and_square


@pytest.mark.parametrize("has_offsets", [True, False])
def test_sums_and_squares_are_those_of_plain_products(add_and_square, has_offsets):
    torch.manual_seed(0)
    gradients = torch.randn(3, 5000).to(DEVICE)  # the last block has 904 elements
    membership = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], device=DEVICE)
    offsets = torch.tensor([[0.5, -2.0, 0.25]], device=DEVICE)
    weights = torch.zeros(3, 7, device=DEVICE)[:, 2:5]  # of a chunk of the trajectories
    weights.copy_(torch.cat([offsets, membership]))
    weighted, held = torch.randn(5000).to(DEVICE), torch.randn(2, 3, 5000).to(DEVICE)
    by_group = held[:, 1]  # one matrix of several: rows are apart
    expected = weighted + offsets[0] @ gradients, by_group + membership @ gradients
    squares = add_and_square(gradients, weights, weighted if has_offsets else None, by_group)
    torch.testing.assert_close(squares, gradients.double().square().sum(dim=1), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(by_group, expected[1], rtol=1e-5, atol=1e-6)
    if has_offsets:
        torch.testing.assert_close(weighted, expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", [llama, mixtral])
@pytest.mark.parametrize("micro_batch", [64, 3], ids=["whole groups", "parts of groups"])
def test_a_step_with_the_kernel_has_the_gradient_of_one_without(
    add_and_square, family, micro_batch, monkeypatch
):
    groups = sampled_groups(seeded_model(family))
    spec = with_micro_batches(make_spec(), micro_batch)
    monkeypatch.setattr(measurement, "is_kept_cheaper", lambda *_: False)
    monkeypatch.setattr(measurement, "_SMALL_ELEMENTS", 0)
    expected = gradient_of_step(seeded_model(family).to(DEVICE), spec, groups)
    calls = []

    def kernel(gradients, *sums):
        calls.append(len(gradients))
        return add_and_square(gradients, *sums)

    monkeypatch.setattr(weighted_sum, "fused_sums", lambda _: kernel)
    found = gradient_of_step(seeded_model(family).to(DEVICE), spec, groups)
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_kernel_is_used_where_it_adds_right(add_and_square):
    assert weighted_sum._kernel_of.__wrapped__(DEVICE) is add_and_square


def test_without_triton_gradients_are_added_by_pytorch(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert weighted_sum._kernel_of.__wrapped__(torch.device("cpu")) is None
