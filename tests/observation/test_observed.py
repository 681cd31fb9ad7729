"""Rules, boards and metrics on real runs, as one real Prometheus scrapes and judges them all.

Two of the runs are demos: what `make` starts, and they end as the README says.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.observation.findings import local_findings, missed_bars
from tests.observation.local_runs import Observation, ObservedRun, observed_runs


@pytest.fixture(scope="session")
def observation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observation]:
    with observed_runs(tmp_path_factory.mktemp("observed")) as both:
        yield both


def test_a_collapse_alerts_health_is_silent_and_every_panel_has_data(
    observation: Observation,
) -> None:
    found = local_findings(observation)
    assert missed_bars(found) == [], found


def result_of(run: ObservedRun) -> dict[str, Any]:
    """The summary with which `vcpo run --json` ends."""
    lines = [line for line in run.output.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@pytest.mark.parametrize("name", ["healthy", "vllm"])
def test_a_demo_completes_and_its_model_has_learned(observation: Observation, name: str) -> None:
    run: ObservedRun = getattr(observation, name)
    assert run.status == 0, run.output[-3000:]
    result = result_of(run)
    assert (result["state"], result["collapse"]) == ("complete", None)
    assert result["accuracy_after"] > result["accuracy_before"]


def test_the_demo_of_adapters_serves_every_version_and_merges_none(
    observation: Observation,
) -> None:
    result = result_of(observation.vllm)
    assert result["adapter_swaps"] > 0
    assert result["merged"] == 0
