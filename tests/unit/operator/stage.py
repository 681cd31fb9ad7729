"""A reconciler on a fake API server, with a learner that says what a test wants."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from kubernetes import client

from tests.kube.fake_api_server import FakeApiServer
from tests.kube.recorder import Recorded
from tests.kube.targets import DeleteOptions, WriteOptions, target_of
from tests.unit.operator.scenes import DEFAULTS, KEY, document
from vcpo.metrics import OperatorMetrics
from vcpo.wire.phase import RunPhase
from vcpo_operator.cluster_api.client import Cluster
from vcpo_operator.cluster_api.executor import Executor
from vcpo_operator.crd import crd, scaler_crd
from vcpo_operator.names import RunKey
from vcpo_operator.observed.index_view import (
    PODS,
    RUNS,
    WATCHED,
    IndexedView,
    index_child,
    index_pod,
    index_run,
)
from vcpo_operator.observed.records import Observed, RunRecord
from vcpo_operator.observed.report import LearnerReport
from vcpo_operator.reconcile.exports import RunExports
from vcpo_operator.reconcile.reconciler import Outcome, Reconciler
from vcpo_operator.signals.client import LearnerLines

_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_RUNS = f"/apis/vcpo.dev/v1alpha1/namespaces/{KEY.namespace}/vcporuns"
_QUIET_TURNS = 12


class ScriptedLearner(LearnerLines):
    """Stands in for the connections to learners: says what it is told to say."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)
        self.says: LearnerReport | None = None
        self.told: list[int] = []

    async def ask(self, key: RunKey, *, period_s: float) -> LearnerReport | None:
        """The scripted report."""
        return self.says

    async def throttle(self, key: RunKey, admission_lag_steps: int, reason: str) -> None:
        """Note the order."""
        self.told.append(admission_lag_steps)

    async def drain(self, key: RunKey, reason: str) -> None:
        """Have nothing under way."""
        if self.says is not None:
            signals = replace(self.says.signals, in_flight=0)
            self.says = replace(self.says, signals=signals, phase=RunPhase.DRAINING)

    async def hang_up(self, key: RunKey) -> None:
        """Nothing is connected."""


class StoreView:
    """Sees what the server's store holds now, as watches would tell it a moment later."""

    def __init__(self, server: FakeApiServer) -> None:
        self._server = server

    def run(self, key: RunKey) -> RunRecord | None:
        """A run."""
        return self._view().run(key)

    def observed(self, key: RunKey) -> Observed:
        """What belongs to a run."""
        return self._view().observed(key)

    def _view(self) -> IndexedView:
        view = IndexedView()
        indices: dict[str, dict[RunKey, list[Any]]] = {
            RUNS: _collected(index_run(body) for body in self._objects("vcpo.dev", RUNS)),
            PODS: _collected(index_pod(body) for body in self._objects("", PODS)),
        }
        for kind in WATCHED:
            bodies = self._objects(kind.group, kind.plural)
            indices[kind.plural] = _collected(index_child(kind, body) for body in bodies)
        view.indices = indices
        return view

    def _objects(self, group: str, plural: str) -> list[dict[str, Any]]:
        return self._server.api.store.objects((group, plural), KEY.namespace)


def _collected(entries: Iterator[dict[RunKey, Any]]) -> dict[RunKey, list[Any]]:
    found: dict[RunKey, list[Any]] = {}
    for entry in entries:
        for key, record in entry.items():
            found.setdefault(key, []).append(record)
    return found


class Stage:
    """One server, one run, and the operator's reconciler."""

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server
        self.learner = ScriptedLearner()
        self.now_s = 1_700_000_000.0
        self._reconciler = self._born()

    async def look(self) -> Outcome:
        """Reconcile once, and let the controllers of the server catch up."""
        outcome = await self._reconciler.reconcile(KEY)
        await self.server.settled()
        return outcome

    async def settle(self) -> None:
        """Reconcile until nothing is written any more."""
        for _ in range(_QUIET_TURNS):
            before = len(self.writes())
            await self.look()
            if len(self.writes()) == before:
                return
        raise AssertionError("the operator does not come to rest")

    def writes(self) -> list[Recorded]:
        """Requests that change something."""
        return self.server.recorder.writes()

    def create_run(self, **spec: Any) -> None:
        """Create the run as its user."""
        self._create(_RUNS, {**document(**spec), **_TYPE})

    def change_run(self, **spec: Any) -> None:
        """Change fields of the run's spec as its user."""
        patch = {"spec": spec}
        target = target_of(self.server.api.catalogue, f"{_RUNS}/{KEY.name}")
        options = WriteOptions(manager="kubectl")
        self.server.api.patch(target, "application/merge-patch+json", patch, options)

    def scale(self, replicas: int) -> None:
        """Scale the Deployment of the group `main` by hand."""
        self._scale("/apis/apps/v1", "deployments/demo-rollout-main", replicas)

    def _scale(self, api: str, resource: str, replicas: int) -> None:
        path = f"{api}/namespaces/{KEY.namespace}/{resource}/scale"
        target = target_of(self.server.api.catalogue, path)
        options = WriteOptions(manager="hpa")
        patch = {"spec": {"replicas": replicas}}
        self.server.api.patch(target, "application/merge-patch+json", patch, options)

    def ask(self, replicas: int) -> None:
        """Ask for workers of the group `main` as an autoscaler does, by the group's scaler."""
        self._scale("/apis/vcpo.dev/v1alpha1", "vcporolloutscalers/demo-rollout-main", replicas)

    def place_pods(self) -> None:
        """Give every pod a node, as the scheduler does."""
        for pod in self.server.api.store.objects(("", PODS), KEY.namespace):
            path = f"/api/v1/namespaces/{KEY.namespace}/pods/{pod['metadata']['name']}"
            self.server.api.schedule(target_of(self.server.api.catalogue, path), "node-0")

    def delete(self, path: str) -> None:
        """Delete an object by hand."""
        self.server.api.delete(target_of(self.server.api.catalogue, path), DeleteOptions())

    def get(self, group: str, plural: str, name: str) -> dict[str, Any]:
        """An object; empty when there is none."""
        return self.server.api.store.get((group, plural), KEY.namespace, name) or {}

    def run_status(self) -> dict[str, Any]:
        """The run's status."""
        found: dict[str, Any] = self.get("vcpo.dev", "vcporuns", KEY.name).get("status", {})
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition of the run."""
        (found,) = (each for each in self.run_status()["conditions"] if each["type"] == kind)
        return found["status"], found["reason"]

    def message(self, kind: str) -> str:
        """Message of a condition of the run."""
        (found,) = (each for each in self.run_status()["conditions"] if each["type"] == kind)
        return str(found["message"])

    def replicas(self) -> int:
        """Replicas of the group `main`."""
        found: int = self.get("apps", "deployments", "demo-rollout-main")["spec"]["replicas"]
        return found

    def children(self) -> dict[str, Any]:
        """Specs of all that the run consists of, by kind and name; pods excepted."""
        found = {}
        for group, plural in _KINDS:
            for body in self.server.api.store.objects((group, plural), KEY.namespace):
                content = {key: body[key] for key in ("spec", "data") if key in body}
                found[f"{plural}/{body['metadata']['name']}"] = _without_addresses(content)
        return found

    def _create(self, path: str, body: dict[str, Any]) -> None:
        target = target_of(self.server.api.catalogue, path)
        self.server.api.create(target, body, WriteOptions(manager="kubectl"))

    def _born(self) -> Reconciler:
        settings = client.Configuration(host=self.server.url)
        cluster = Cluster(client.ApiClient(settings))
        return Reconciler(
            view=StoreView(self.server),
            executor=Executor(cluster, self.learner),
            lines=self.learner,
            defaults=DEFAULTS,
            exports=RunExports(OperatorMetrics()),
            clock=lambda: self.now_s,
        )


_TYPE = {"apiVersion": "vcpo.dev/v1alpha1", "kind": "VCPORun"}
_KINDS = [(kind.group, kind.plural) for kind in WATCHED] + [("", "configmaps")]


def _without_addresses(content: dict[str, Any]) -> dict[str, Any]:
    clean = copy.deepcopy(content)
    if "spec" in clean:
        for name in ("clusterIP", "clusterIPs"):
            clean["spec"].pop(name, None)
    return clean


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    """A stage with the definition installed and the namespace of the run."""
    async with FakeApiServer() as server:
        made = Stage(server)
        made._create("/api/v1/namespaces", {"metadata": {"name": KEY.namespace}})
        made._create(_DEFINITIONS, crd())
        made._create(_DEFINITIONS, scaler_crd())
        await asyncio.wait_for(server.settled(), 5)
        yield made
