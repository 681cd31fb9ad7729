"""What the Prometheus beside the cluster saw of a run: metrics, panels, and the throttle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.e2e.sightings import Sightings
from tests.e2e.user import NAMESPACE
from tests.fakes.kubelet.client import KubeClient
from tests.fixtures.observation.exposure import compare, exposed_names, most_series
from tests.fixtures.observation.panel_queries import OPERATOR_HOST
from tests.fixtures.observation.panels import answer_panels
from tests.fixtures.observation.prometheus_server import PrometheusServer
from vcpo.metrics import catalogue
from vcpo.metrics.metric import Feature, Metric

PARTS: dict[str, tuple[Metric, ...]] = {
    "learner": (catalogue.BUILD_INFO, *catalogue.SERVER, *catalogue.LEARNER),
    "rollout": (catalogue.BUILD_INFO, *catalogue.SERVER, *catalogue.ROLLOUT),
    "operator": (catalogue.BUILD_INFO, *catalogue.HOST, *catalogue.OPERATOR),
}
"""What each part of a run in a cluster declares; its workers have the engine `hf`."""

FEATURES = (
    Feature.EVALUATION,
    Feature.CHECKPOINT,
    Feature.CERTIFICATES,
    Feature.STARTING,
    Feature.GRADIENT_NORMS,
)
"""What the run has, of what a metric may need to appear."""

_EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """A run that a Prometheus saw from one Unix time to another."""

    server: PrometheusServer
    name: str
    start_s: float
    end_s: float


def observe(run: SeenRun) -> dict[str, Any]:
    """Compare what each part exposed with its declarations, and ask every panel's queries."""
    undeclared, missing, series = [], [], {}
    for part, declared in PARTS.items():
        selector = f'{{part="{part}"}}'
        names = exposed_names(run.server, selector, run.start_s, run.end_s)
        exposure = compare(names, declared, FEATURES)
        undeclared += exposure.undeclared
        missing += exposure.missing
        series[part] = most_series(run.server, selector, run.start_s, run.end_s)
    panels = answer_panels(
        run.server,
        namespace=NAMESPACE,
        run=run.name,
        start_s=run.start_s,
        end_s=run.end_s,
        features=(*FEATURES, OPERATOR_HOST),
    )
    return {
        "undeclared": undeclared,
        "missing": missing,
        "series_per_run": series,
        "panels_with_data": sorted("/".join(panel) for panel in panels.with_data),
    }


async def throttle_is_told(run: SeenRun, seen: Sightings, client: KubeClient) -> bool:
    """Whether event, status, condition and metric all say that a low ESS tightened the limit."""
    decision = seen.throttled or {}
    events = (await client.get(_EVENTS))["items"]
    messages = [each["message"] for each in events if each["reason"] == "Throttled"]
    reason = decision.get("reason", "")
    metric = f'vcpo_run_throttles_total{{direction="tighten",run="{run.name}"}} > 0'
    return (
        "ESS" in reason
        and any(reason in each for each in messages)
        and seen.ess_health == "BelowFloor"
        and bool(run.server.query_range(metric, run.start_s, run.end_s))
    )
