"""What the processes of real runs expose, as a real Prometheus scraped it."""

from __future__ import annotations

import pytest

from tests.observation.findings import LOCAL_PARTS, empty_panels, exposures
from tests.observation.local_runs import Observation


@pytest.mark.parametrize("part", LOCAL_PARTS)
def test_a_part_exposes_what_it_declares_and_nothing_else(
    observation: Observation, part: str
) -> None:
    exposure = exposures(observation)[part]
    assert (exposure.undeclared, exposure.missing) == ((), ())


def test_every_panel_has_data_on_a_local_run_that_has_its_metrics(observation: Observation) -> None:
    assert empty_panels(observation) == frozenset()
