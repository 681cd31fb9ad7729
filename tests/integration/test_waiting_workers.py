"""Workers that wait at a learner's process, on real connections."""

import math
import os

from benchmarks.learner.waiting_workers import measure


async def test_what_workers_cost_that_wait_and_hear_of_versions_is_measured():
    core = min(os.sched_getaffinity(0))
    found = await measure(3, seconds=4.0, versions=5, core=core)
    # The learner's CPU time while they wait is above that without them by less than it scatters.
    assert math.isfinite(found["waiting_us_per_s"])
    assert found["version_us_per_worker"] >= 0.0
    assert found["workers"] == 3
