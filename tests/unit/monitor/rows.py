"""A row of a throttled run, for the tests of tables and screens."""

from __future__ import annotations

from tests.fixtures.run_views import view_with
from vcpo.monitor.run_row import RunRow


def row(place: str = "runs/countdown-001", **changes) -> RunRow:
    """The row; the last step ended 3 s ago unless changes say otherwise."""
    return RunRow(place=place, view=view_with(**{"since_step_s": 3.0, **changes}))
