"""A Prometheus beside the cluster: it scrapes the pods that ask for it, and the operator.

Debian builds its Prometheus without the discovery of Kubernetes. So this module follows the pods in
its place and writes files of targets. The annotations are those of the pods themselves. Labels are
those that the chart's PodMonitor gives, `namespace` and `pod`, and `part` for the tests.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.e2e.user import NAMESPACE
from tests.fakes.kubelet.client import KubeClient
from tests.fixtures.observation.prometheus_server import PrometheusServer, prometheus_server

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_PREFIX = "prometheus.io/"
_Target = dict[str, Any]


@contextlib.asynccontextmanager
async def scraping(
    client: KubeClient, root: Path, operator_metrics_port: int
) -> AsyncIterator[PrometheusServer]:
    """Run a Prometheus that scrapes the operator and every pod, as pods come and go."""
    folder = root / "prometheus"
    folder.mkdir()
    pods, operator = folder / "pods.json", folder / "operator.json"
    write_targets(operator, [operator_target(operator_metrics_port)])
    following = asyncio.create_task(follow_pods(client, pods))
    try:
        with prometheus_server(folder, targets=[pods, operator]) as server:
            yield server
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def follow_pods(client: KubeClient, path: Path) -> None:
    """Keep a file of targets up to date with the pods of the namespace, until cancelled."""
    targets: dict[str, _Target] = {}
    async for event in client.follow(PODS):
        if event["type"] == "SYNC":
            targets = {}
        for pod in event["items"] if event["type"] == "SYNC" else [event["object"]]:
            name, target = pod["metadata"]["name"], pod_target(pod)
            if target is None or event["type"] == "DELETED":
                targets.pop(name, None)
            else:
                targets[name] = target
        write_targets(path, list(targets.values()))


def pod_target(pod: dict[str, Any]) -> _Target | None:
    """The target that a pod asks for; None while it has no address, or if it asks for none."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    annotations = metadata.get("annotations") or {}
    if annotations.get(_PREFIX + "scrape") != "true" or "podIP" not in status:
        return None
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    labels = {
        "__metrics_path__": annotations.get(_PREFIX + "path", "/metrics"),
        "namespace": metadata["namespace"],
        "pod": metadata["name"],
        "part": metadata["labels"]["vcpo.dev/role"],
    }
    return {"targets": [f"{status['podIP']}:{annotations[_PREFIX + 'port']}"], "labels": labels}


def operator_target(port: int) -> _Target:
    """The target of the operator, whose series name the namespaces of their runs themselves."""
    labels = {"namespace": "vcpo-system", "pod": "vcpo-operator-0", "part": "operator"}
    return {"targets": [f"127.0.0.1:{port}"], "labels": labels}


def write_targets(path: Path, targets: list[_Target]) -> None:
    """Write a file of targets at once, so that Prometheus never reads half of one."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(targets))
    partial.replace(path)
