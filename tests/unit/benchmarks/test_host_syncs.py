"""What a step asks of a GPU, counted on a CPU."""

import pytest
import torch

from benchmarks.learner.host_syncs import Count, count_step, gpu_branches


@pytest.mark.parametrize(
    ("work", "syncs"),
    [
        (lambda numbers: numbers.sum().item(), 1),
        (lambda numbers: bool(numbers.any()), 1),
        (lambda numbers: numbers[[0, 1]], 1),
        (lambda numbers: numbers[numbers > 0], 1),
        (lambda numbers: numbers.nonzero(), 1),
        (lambda _: torch.tensor([1.0, 2.0]), 1),
        (lambda numbers: numbers.repeat_interleave(torch.ones_like(numbers).long()), 1),
        (lambda numbers: numbers[1:].sum() + numbers[None, :2].amax(), 0),
    ],
)
def test_what_a_gpu_is_waited_for_counts(work, syncs):
    numbers = torch.arange(3.0)
    with Count() as count:
        work(numbers)
    assert count.syncs.total() == syncs


def test_a_step_of_more_layers_waits_no_more_often():
    with gpu_branches():
        one, three = (
            count_step("opob", num_layers=num_layers, response_tokens=8) for num_layers in (1, 3)
        )
    assert one["syncs"] == three["syncs"]
    assert one["launches"] < three["launches"]
