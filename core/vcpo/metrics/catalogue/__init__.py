"""Every metric of the project: name, type, help, unit, labels, buckets.

Names follow https://prometheus.io/docs/practices/naming: the prefix `vcpo_`, base units, `_total`
for counters, `_ratio` for shares. Metrics of one step are declared in `vcpo.records.step_record`,
all others here, in one module for each part. Alerts, dashboards and documents use these names only.

Labels are few and bounded: a run's name, a rollout group of its spec (at most 8), and closed sets
of words. Never a step, an id, a time or a message. Learner and rollout workers carry `run` (and
`group`) on all of their metrics; `namespace` and `pod` come with the scrape. A host exports metrics
of many runs and writes `namespace` and `run` itself (a local run has an empty namespace), so its
scrape needs `honorLabels`.
"""

from __future__ import annotations

from vcpo.metrics.catalogue.host import HOST
from vcpo.metrics.catalogue.learner import LEARNER, STEP_GAUGES
from vcpo.metrics.catalogue.operator import OPERATOR
from vcpo.metrics.catalogue.rollout import ROLLOUT, ROLLOUT_ENGINE
from vcpo.metrics.registry import BUILD_INFO, SERVER

LEARNER_LABELS = ("run",)
"""Labels on all metrics of a learner."""

ROLLOUT_LABELS = ("run", "group")
"""Labels on all metrics of a rollout worker."""

ALL = (BUILD_INFO, *SERVER, *LEARNER, *ROLLOUT, *ROLLOUT_ENGINE, *HOST, *OPERATOR)
"""Every metric."""

__all__ = [
    "ALL",
    "BUILD_INFO",
    "HOST",
    "LEARNER",
    "LEARNER_LABELS",
    "OPERATOR",
    "ROLLOUT",
    "ROLLOUT_ENGINE",
    "ROLLOUT_LABELS",
    "SERVER",
    "STEP_GAUGES",
]
