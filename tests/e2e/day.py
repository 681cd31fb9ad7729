"""A platform team's days as one JSON object: the rows of `tests/kube/test_platform_day.py`.

A row is one thing that happens to a run in a cluster; it is explained if its test passes. The other
numbers are what the tests record: each must be 0, and `admitted_as_unit` true.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

DAYS = Path(__file__).resolve().parents[1] / "kube/test_platform_day.py"
NUMBERS = ("runs_restarted_by_upgrade", "gpus_held_after_failure", "flaps", "orphans")


class Rows:
    """Counts what pytest reports."""

    def __init__(self) -> None:
        self.rows, self.explained = 0, 0
        self.numbers: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test that ran, and what it recorded."""
        if report.when == "call":
            self.rows += 1
            self.explained += report.passed
            self.numbers.update({name: int(str(each)) for name, each in report.user_properties})


def main() -> int:
    """Run the days; the last line is the JSON, and the status is 1 if a bar is missed."""
    rows = Rows()
    pytest.main([str(DAYS), "-q", "-n0", "--durations=0", "--durations-min=60"], plugins=[rows])
    numbers = {name: rows.numbers[name] for name in NUMBERS}
    is_unit = rows.numbers["admitted_as_unit"] > 0
    result = {"rows": rows.rows, "explained": rows.explained, **numbers}
    sys.stdout.write(json.dumps({**result, "admitted_as_unit": is_unit}) + "\n")
    is_whole = rows.explained == rows.rows > 0 and is_unit
    return 0 if is_whole and not any(numbers.values()) else 1
