import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.rollout_noise import NoiseSchedule


def schedule(**changed):
    settings = {"initial_sigma": 1e-2, "final_sigma": 1e-4, "num_stages": 10, "total_steps": 100}
    return NoiseSchedule(**{**settings, **changed})


def test_the_worked_example():
    # Ten stages from 1e-2 to 1e-4: a factor of 10^(-1/4) each.
    expected = [0, 0.01, 0.00562, 0.00316, 0.00178, 0.001, 0.00056, 0.00032, 0.00018, 0.0001]
    found = [schedule().sigma(step) for step in range(0, 100, 10)]
    assert found == pytest.approx(expected, rel=2e-2)


def test_a_stage_lasts_until_the_next_begins():
    assert schedule().sigma(9) == 0.0
    assert schedule().sigma(10) == schedule().sigma(19) == 0.01


@given(st.integers(0, 500), st.integers(1, 400), st.integers(3, 40))
def test_noise_stays_between_its_ends_and_never_rises_again(step, total_steps, num_stages):
    found = schedule(total_steps=total_steps, num_stages=num_stages)
    sigma, later = found.sigma(step), found.sigma(step + 1)
    assert sigma == 0.0 or 1e-4 * (1 - 1e-9) <= later <= sigma <= 1e-2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("initial_sigma", 0.0),
        ("final_sigma", math.inf),
        ("num_stages", 2),
        ("total_steps", 0),
    ],
)
def test_a_setting_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"{field} is {value}|{field} {value}"):
        schedule(**{field: value})
