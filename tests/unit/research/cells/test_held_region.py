"""Regions of studies: one holds the rate of a step, one lets uncertain tokens miss more."""

import math

import pytest

from research.cells.experiment import HeldRegion
from vcpo.algo.ess.trust_region import TrustRegion

LAG_1 = {1: 10}


def after(region, steps, missing_nats):
    """Return the region after steps at the rates that it allows, of tokens one step old."""
    for _ in range(steps):
        region = region.observe(missing_nats, LAG_1)
        bound = region.largest_rate(1e-3)
        region = region.step(bound, bound)
    return region


def test_before_its_step_it_is_the_region():
    region = TrustRegion(horizon_steps=32)
    held = HeldRegion.of(region, held_at_step=20)
    assert after(held, 20, 0.3).bound == after(region, 20, 0.3).bound


@pytest.mark.parametrize("missing_nats", [0.0, 3.0])
def test_from_its_step_on_the_rate_is_that_of_the_step_whatever_batches_show(missing_nats):
    held = after(HeldRegion.of(TrustRegion(horizon_steps=32), held_at_step=20), 20, 0.3)
    later = after(held, 50, missing_nats)
    # Of tokens one step old e = a r, so the region's edge, e* / (a sqrt H), is r e* / (e sqrt H),
    # which is below r here: the rate had fallen to the smallest share by step 20.
    assert later.largest_rate(1e-3) == held.bound == pytest.approx(1e-3 / 64)
    assert math.isclose(later.largest_rate(1e-6), 1e-6)


def test_the_region_itself_goes_on():
    region = after(TrustRegion(horizon_steps=32), 20, 0.3)
    assert after(region, 50, 0.0).bound > region.bound
