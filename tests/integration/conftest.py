"""Real runs for the integration tests: `vcpo run` as a user starts it, on a small task."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.browser import Browser, find_chromium
from tests.integration.local_run import StartRun, runs_in


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium for all tests; a machine without one skips them, but not the CI."""
    found = find_chromium()
    if found is None and os.environ.get("CI") == "true":
        pytest.fail("CI must have a browser, and no Chromium is on the PATH")
    if found is None:
        pytest.skip("no Chromium is on the PATH")
    with Browser(found, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[StartRun]:
    """Start `vcpo run` on the small task; whatever is left of it is killed afterwards."""
    with runs_in(tmp_path) as start:
        yield start
