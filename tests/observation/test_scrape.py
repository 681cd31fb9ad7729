"""What the processes of real runs expose, as a real Prometheus scraped it."""

from __future__ import annotations

import pytest

from tests.observation.findings import LOCAL_PARTS, exposures, local_panels, series_per_run
from tests.observation.local_runs import Observation
from tools.monitoring.dashboards import BOARDS

LIBRARY_SERIES = 16
"""Series of `prometheus_client` about the process and the interpreter, and Prometheus' own."""


@pytest.mark.parametrize("part", LOCAL_PARTS)
def test_a_part_exposes_what_the_catalogue_declares_and_nothing_else(
    observation: Observation, part: str
) -> None:
    exposure = exposures(observation)[part]
    assert (exposure.undeclared, exposure.missing) == ((), ())


def test_a_process_has_no_more_series_than_its_declarations_allow(observation: Observation) -> None:
    found = series_per_run(observation)
    most = {
        part: sum(metric.most_series for metric in declared) + LIBRARY_SERIES
        for part, declared in LOCAL_PARTS.items()
    }
    assert {part for part, series in found.items() if series > most[part]} == set()


def test_every_panel_but_those_of_the_operator_has_data_on_a_local_run(
    observation: Observation,
) -> None:
    expected = {(board.uid, panel.slug) for board in BOARDS for panel in board.panels}
    without = local_panels(observation).without_data
    assert {panel for panel in without & expected if panel[0] != "vcpo-operator"} == set()
