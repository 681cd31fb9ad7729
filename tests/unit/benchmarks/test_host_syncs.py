"""What a step asks of a GPU, counted on a CPU."""

import pytest
import torch

from benchmarks.learner.host_syncs import Count, Side, gpu_branches
from vcpo_learner.device import to_device


@pytest.mark.parametrize(
    ("work", "syncs"),
    [
        (lambda numbers: numbers.sum().item(), 1),
        (lambda numbers: bool(numbers.any()), 1),
        (lambda numbers: numbers[[0, 1]], 1),
        (lambda numbers: numbers[numbers > 0], 1),
        (lambda numbers: numbers.nonzero(), 1),
        (lambda numbers: torch.tensor([1.0, 2.0], device=numbers.device), 1),
        (lambda numbers: to_device(torch.tensor([1.0, 2.0]), numbers.device), 0),
        (lambda numbers: numbers.repeat_interleave(torch.ones_like(numbers).long()), 1),
        (lambda numbers: numbers[1:].sum() + numbers[None, :2].amax(), 0),
    ],
)
def test_what_a_gpu_is_waited_for_counts(work, syncs):
    numbers = torch.arange(3.0)
    with Count() as count:
        work(numbers)
    assert count.syncs.total() == syncs


def test_a_layer_with_norms_costs_no_wait_and_a_quarter_more_launches_at_most():
    with gpu_branches():
        opob, mean = (
            [Side(side, num_layers=num_layers, response_tokens=8).count() for num_layers in (1, 3)]
            for side in ("opob", "mean")
        )
    assert opob[0]["syncs"] == opob[1]["syncs"]
    launches = [three["launches"] - one["launches"] for one, three in (opob, mean)]
    assert 0 < launches[0] <= 1.25 * launches[1]
