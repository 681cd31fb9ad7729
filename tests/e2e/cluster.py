"""`python -m tests.e2e.cluster` drives a run in a cluster from `kubectl apply` to its deletion.

An API server, a fake kubelet and the operator's own process run on this machine; the pods train.
The driver edits the run's spec while it trains, so that each decision of the operator is seen:

1. It shortens the poll period and the cooldowns, so that five decisions fit into each second. The
   number of steps that a machine takes in a second then matters less.
2. It raises the ESS floor above any ESS ratio, so that the operator lowers the admission lag.
3. It raises the idle ratios, so that the operator removes the workers that the lower admission lag
   leaves idle.
4. It restores the fields to their values in the file.

The last line of the output is one JSON object. The exit status is 1 if a bar is missed.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.leftovers import objects_of, processes_below
from tests.e2e.observed import SeenRun, observe, throttle_is_told
from tests.e2e.scraping import scraping
from tests.e2e.sightings import Sightings
from tests.e2e.user import NAMESPACE, RUNS, User, config_map, load
from tests.fakes.kubelet.client import KubeClient
from tests.fakes.kubelet.kubelet import Kubelet
from tests.fakes.kubelet.settings import ImageRoot, KubeletSettings
from tests.fixtures.kubernetes.control_plane import ControlPlane, control_plane
from tests.fixtures.kubernetes.operator_process import operator_process
from tests.fixtures.observation.prometheus_server import PrometheusServer
from vcpo.local.processes.child import free_port
from vcpo.records.journal import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "examples/vcporun.yaml"
MODEL = ROOT / "examples/models/tiny"
DEFINITIONS = sorted((ROOT / "charts/vcpo/files").glob("*.crd.yaml"))
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
FREQUENT = {"pollSeconds": 0.2, "scaleUpCooldownSeconds": 1, "scaleDownCooldownSeconds": 1}
"""Fields of `spec.control` under which the operator decides five times a second."""
_GONE_S = 60.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Everything that runs, and the ways to it."""

    control_plane: ControlPlane
    client: KubeClient
    user: User
    prometheus: PrometheusServer | None
    """Scrapes the pods and the operator; None on a machine that has no Prometheus."""
    root: Path


@contextlib.asynccontextmanager
async def cluster(root: Path, images: Path | None = None) -> AsyncIterator[Cluster]:
    """Start a control plane, a node, the operator, and a Prometheus where there is one.

    images: folder of the images' roots, as `scripts.supply.images_check --keep` leaves them; None
        runs all on the files of this machine.
    """
    roots = {} if images is None else _image_roots(images)
    if roots:
        root.chmod(0o755)  # the images' user passes through
    async with contextlib.AsyncExitStack() as stack:
        plane = await stack.enter_async_context(control_plane(root))
        client = await stack.enter_async_context(KubeClient(plane.access))
        settings = KubeletSettings(
            access=plane.access,
            root=root,
            images=roots,
            longest_probe_period_s=0.5,
            first_back_off_s=1.0,
        )
        user = User(client)
        for definition in DEFINITIONS:
            await user.apply(load(definition))
        kubelet = await stack.enter_async_context(Kubelet(settings))
        metrics_port = free_port()
        await stack.enter_async_context(
            operator_process(
                plane,
                kubelet.network,
                root,
                metrics_port=metrics_port,
                image=roots.get("vcpo-operator"),
            )
        )
        prometheus = None
        if shutil.which("prometheus") is not None:
            prometheus = await stack.enter_async_context(scraping(client, root, metrics_port))
        yield Cluster(
            control_plane=plane, client=client, user=user, prometheus=prometheus, root=root
        )


def _image_roots(folder: Path) -> dict[str, ImageRoot]:
    kept = {"vcpo-operator": "operator", "vcpo-learner": "learner-cpu"}
    kept["vcpo-rollout"] = "rollout-cpu"
    return {image: ImageRoot.kept(folder, name) for image, name in kept.items()}


async def drive(here: Cluster, limit_s: float, steps: int | None = None) -> dict[str, Any]:
    """Apply the example, edit it on its way, delete it; what was seen.

    steps: of the run; None takes those of the example.

    Raises:
        TimeoutError: when the run has not come to its end in time.
    """
    name, start_s = load(RUN_FILE)["metadata"]["name"], time.time()
    await here.user.apply(config_map("tiny-model", MODEL))
    seen, changed, started_s = Sightings(), asyncio.Event(), time.monotonic()
    following = [
        asyncio.create_task(_follow_run(here, seen, changed, started_s)),
        asyncio.create_task(_follow_workers(here, seen, changed)),
    ]
    try:
        async with asyncio.timeout(limit_s):
            await here.user.apply(_run(steps))
            await _edit_on_the_way(here, name, seen, changed)
            await _until(seen.has_ended, seen, changed)
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
    accuracies = [each.accuracy for each in read_metrics(_run_dir(here)).evaluations]
    observed = await _observe(here, name, start_s, seen)
    throttles = [each for each in await here.user.events(name) if each["reason"] == "Throttled"]
    await here.user.delete(name)
    left = await _left_behind(here, name)
    return {
        "server": here.control_plane.kind,
        "ready_seconds": None if seen.ready_s is None else round(seen.ready_s, 1),
        "seconds": round(time.monotonic() - started_s, 1),
        "steps": seen.steps,
        "conditions": seen.conditions,
        "replicas_seen": {"min": min(_working_counts(seen)), "max": max(_working_counts(seen))},
        "scaled_up": seen.ups,
        "scaled_down": seen.downs,
        "throttle_events": seen.throttles,
        "throttle_reasons": sorted({each["message"].partition(": ")[2] for each in throttles}),
        "accuracy_before": round(accuracies[0], 3),
        "accuracy_after": round(accuracies[-1], 3),
        "left_behind": left,
        "orphans": len(processes_below(here.root)),
        **observed,
    }


def _run(steps: int | None) -> dict[str, Any]:
    """Return the example's run, with another number of steps if one is given."""
    run = load(RUN_FILE)
    if steps is not None:
        run["spec"]["steps"] = steps
    return run


def shortfalls(result: dict[str, Any]) -> list[str]:
    """Bars that a result misses; empty when it passes."""
    bars = {
        "the run must complete": "Complete" in result["conditions"],
        "workers must be added at least once": result["scaled_up"] >= 1,
        "workers must be removed at least once": result["scaled_down"] >= 1,
        "replicas must follow": result["replicas_seen"]["max"] > result["replicas_seen"]["min"],
        "the forced low ESS must throttle": result["throttle_events"] >= 1,
        "a throttle must say the share of the ESS": any(
            "of the on-policy ratio" in each for each in result["throttle_reasons"]
        ),
        "training must help": result["accuracy_after"] > result["accuracy_before"],
        "deleting must leave nothing behind": not result["left_behind"],
        "no process may be left": result["orphans"] == 0,
        "event, status, condition and metric must tell why it throttled": result.get(
            "throttle_reason_visible", True
        ),
        "every sample must be declared": not result.get("undeclared"),
        "every declared metric must have a sample": not result.get("missing"),
    }
    return [bar for bar, holds in bars.items() if not holds]


async def _edit_on_the_way(
    here: Cluster, name: str, seen: Sightings, changed: asyncio.Event
) -> None:
    spec = load(RUN_FILE)["spec"]
    control, groups = spec["control"], spec["rollouts"]
    await here.user.edit(name, {"control": FREQUENT})
    await _until(lambda: seen.ups >= 1 and max(_working_counts(seen)) > 1, seen, changed)
    _say("raising the ESS floor to 1, which no batch reaches")
    await here.user.edit(name, {"control": {"essFloorRatio": 1.0}})
    await _until(lambda: seen.throttles >= 1, seen, changed)
    _say("throttled; lowering maxReplicas, so that workers are removed")
    fewest = [{**group, "maxReplicas": max(1, group["minReplicas"])} for group in groups]
    await here.user.edit(name, {"rollouts": fewest})
    await _until(lambda: seen.downs >= 1, seen, changed)
    _say("scaled down; restoring the fields")
    # A null removes a field that the file does not set.
    edited = {"essFloorRatio", *FREQUENT}
    restored = {field: control.get(field) for field in edited}
    await here.user.edit(name, {"control": restored, "rollouts": groups})


async def _until(condition: Callable[[], bool], seen: Sightings, changed: asyncio.Event) -> None:
    while not condition() and not seen.has_ended():
        changed.clear()
        await changed.wait()


async def _follow_run(
    here: Cluster, seen: Sightings, changed: asyncio.Event, started_s: float
) -> None:
    async for event in here.client.follow(RUNS):
        runs = event["items"] if event["type"] == "SYNC" else [event["object"]]
        for run in runs:
            before = (dict(seen.conditions), seen.steps, seen.throttles)
            seen.see_run(run, time.monotonic() - started_s)
            if before != (seen.conditions, seen.steps, seen.throttles):
                _say(f"step {seen.steps}, {_status_line(run)}")
        changed.set()


async def _follow_workers(here: Cluster, seen: Sightings, changed: asyncio.Event) -> None:
    async for event in here.client.follow(DEPLOYMENTS):
        if event["type"] == "DELETED":
            continue
        for deployment in event["items"] if event["type"] == "SYNC" else [event["object"]]:
            before = list(seen.ready_workers)
            seen.see_deployment(deployment)
            if before != seen.ready_workers:
                _say(f"{seen.ready_workers[-1]} of {deployment['spec']['replicas']} workers ready")
        changed.set()


async def _observe(here: Cluster, name: str, start_s: float, seen: Sightings) -> dict[str, Any]:
    """What Prometheus saw; empty on a machine that has none."""
    if here.prometheus is None:
        return {}
    run = SeenRun(server=here.prometheus, name=name, start_s=start_s, end_s=time.time())
    told = await throttle_is_told(run, seen, here.client)
    return {"throttle_reason_visible": told, **await asyncio.to_thread(observe, run)}


async def _left_behind(here: Cluster, name: str) -> list[str]:
    """Objects that are still there after a while; pods need theirs to leave."""
    deadline_s = time.monotonic() + _GONE_S
    while left := await objects_of(name, here.client):
        if time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(_POLL_S)
    return []


def _working_counts(seen: Sightings) -> list[int]:
    return [each for each in seen.ready_workers if each] or [0]


def _status_line(run: dict[str, Any]) -> str:
    """The columns that people look at, on one line."""
    status = run.get("status") or {}
    ready, fed = _reason(status, "Ready"), _reason(status, "LearnerFed")
    ess, lag = status.get("essRatio"), (status.get("lag") or {}).get("p50")
    return (
        f"{ready}, {fed}, ESS {ess}, lag {lag}, "
        f"admission lag {status.get('admissionLagSteps')}, workers {status.get('workers')}"
    )


def _reason(status: dict[str, Any], kind: str) -> str:
    conditions = status.get("conditions") or ()
    return next((each["reason"] for each in conditions if each["type"] == kind), "")


def _run_dir(here: Cluster) -> Path:
    (metrics,) = (here.root / "claims").rglob("metrics.jsonl")
    return metrics.parent


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _main(limit_s: float, steps: int | None, images: Path | None) -> int:
    with tempfile.TemporaryDirectory(prefix="vcpo-e2e-") as folder:
        root = Path(folder)
        async with cluster(root, images) as here:
            _say(f"control plane: {here.control_plane.kind}; logs below {root}")
            try:
                result = await drive(here, limit_s, steps)
            except TimeoutError:
                _say(_last_words(root))
                raise
        missed = shortfalls(result)
        if missed:
            _say(_last_words(root))
        for bar in missed:
            _say(f"missed: {bar}")
        _say(json.dumps(result))
        return 1 if missed else 0


def _last_words(root: Path) -> str:
    logs = sorted(root.rglob("*.log"))
    return "\n".join(f"== {log.relative_to(root)}\n{log.read_text()[-3000:]}" for log in logs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.cluster", description=__doc__)
    parser.add_argument("--limit-seconds", type=float, default=420.0, help="give up after this")
    parser.add_argument("--steps", type=int, help="of the run [those of its file]")
    parser.add_argument(
        "--roots", type=Path, help="run all in the images' roots that this folder keeps, as root"
    )
    options = parser.parse_args()
    sys.exit(asyncio.run(_main(options.limit_seconds, options.steps, options.roots)))
