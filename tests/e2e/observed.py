"""What the Prometheus beside the cluster saw of a run: metrics, panels, and the throttle."""

from dataclasses import dataclass
from typing import Any

from tests.e2e.sightings import Sightings
from tests.e2e.user import NAMESPACE
from tests.fakes.kubelet.client import KubeClient
from tests.fixtures.observation.exposure import compare, exposed_names
from tests.fixtures.observation.panels import panels_without_data
from tests.fixtures.observation.prometheus_server import PrometheusServer
from tools.monitoring.catalogue import BUILD_INFO, PARTS

ABSENT = {
    "vcpo_learner_device_memory_bytes",
    "vcpo_rollout_device_memory_bytes",
    "vcpo_reward_part",
}
"""Metrics that a run without GPU, failing sinks and parts of its reward lacks."""

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
    undeclared, missing = [], []
    for part in ("learner", "rollout", "operator"):
        own = PARTS["host"] if part == "operator" else ()
        exposed = exposed_names(run.server, f'{{part="{part}"}}', run.start_s, run.end_s)
        exposure = compare(exposed, (BUILD_INFO, *own, *PARTS[part]), ABSENT)
        undeclared += exposure.undeclared
        missing += exposure.missing
    empty = panels_without_data(
        run.server,
        namespace=NAMESPACE,
        run=run.name,
        start_s=run.start_s,
        end_s=run.end_s,
        absent=ABSENT,
    )
    return {"undeclared": undeclared, "missing": missing, "panels_without_data": sorted(empty)}


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
