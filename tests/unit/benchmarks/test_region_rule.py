import math

import pytest
import torch

from benchmarks.estimators.region_rule import inverted, missing_nats, recovery_steps


def test_a_mean_of_finite_batches_is_taken_back_to_the_infinite_one():
    generator = torch.Generator().manual_seed(1)
    read = missing_nats(16, 1.0, generator)
    assert read < 0.8
    assert inverted(read, 16) == pytest.approx(1.0, abs=0.03)


def test_equal_weights_miss_nothing():
    assert missing_nats(8, 0.0, torch.Generator()) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("later", "steps"),
    [([0.25, 0.5, 0.9, 0.4], 2), ([0.95], 0), ([0.25, math.nextafter(0.9, 0)], None)],
)
def test_a_rate_has_recovered_at_nine_tenths_of_the_edge(later, steps):
    assert recovery_steps([1.0] * 100 + later) == steps
