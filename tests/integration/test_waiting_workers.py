"""Workers that wait at a learner's process, on real connections."""

import os

from benchmarks.learner.waiting_workers import measure


async def test_workers_that_wait_and_hear_of_versions_cost_a_learner_cpu_time():
    core = min(os.sched_getaffinity(0))
    found = await measure(3, seconds=4.0, versions=5, core=core)
    assert found["waiting_us_per_s"] > 0
    assert found["version_us_per_worker"] > 0
