"""A short soak: a learner's process serves workers on real connections, over several versions."""

import os

from benchmarks.soak import soak


async def test_a_learner_takes_steps_with_what_the_workers_of_a_soak_deliver():
    core = min(os.sched_getaffinity(0))
    found = await soak(4, 6.0, most_workers=4, core=core)
    assert found.steps >= 2
    assert found.trajectories_per_s > 0
    assert len(found.rss_mb) == 10
