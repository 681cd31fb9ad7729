"""One Prometheus over all runs, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.observation.local_runs import Observation, observed_runs


@pytest.fixture(scope="session")
def observation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observation]:
    with observed_runs(tmp_path_factory.mktemp("observed")) as both:
        yield both
