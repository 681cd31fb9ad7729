import math

import pytest
import torch

from benchmarks.estimators.region_rule import largest_error, missing_nats, recovery_steps


def test_small_batches_miss_less_of_the_same_weights():
    few, many = (missing_nats(size, 1.0, torch.Generator().manual_seed(1)) for size in (16, 256))
    assert few < 0.8 < many < 1.0


def test_the_error_is_the_largest_against_batches_of_64():
    sizes = {8: {"read": 0.9}, 64: {"read": 1.0}, 256: {"read": 1.05}}
    assert largest_error(sizes, "read") == pytest.approx(0.1)


def test_equal_weights_miss_nothing():
    assert missing_nats(8, 0.0, torch.Generator()) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("later", "steps"),
    [([0.25, 0.5, 0.9, 0.4], 2), ([0.95], 0), ([0.25, math.nextafter(0.9, 0)], None)],
)
def test_a_rate_has_recovered_at_nine_tenths_of_the_edge(later, steps):
    assert recovery_steps([1.0] * 100 + later) == steps
