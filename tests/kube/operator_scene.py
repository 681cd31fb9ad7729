"""The operator's reconciler on an API server, call by call, without kopf and without training.

The view is read from the server before every look: as fresh as watches can be. A learner is a
script that says what the test wants. An operator that dies is one whose memory is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import kopf
from kubernetes import client

from tests.kube.access import User
from tests.kube.fake_api_server import FakeApiServer
from tests.kube.kubelet_client import ApiStatusError, KubeClient
from tests.kube.operator_world import FakeWorld, RealWorld, World, access_to, fake_clock
from tests.kube.real_api_server import Endpoint
from vcpo.control import RunSignals
from vcpo.metrics import OperatorMetrics
from vcpo.wire.phase import RunPhase
from vcpo_operator.app import Operator, Options
from vcpo_operator.children.family import OperatorDefaults
from vcpo_operator.cluster_api.client import Cluster
from vcpo_operator.cluster_api.executor import Executor
from vcpo_operator.crd import crd, scaler_crd
from vcpo_operator.decisions.status import PROGRESS_PERIOD_S
from vcpo_operator.names import RunKey
from vcpo_operator.observed.report import LearnerReport
from vcpo_operator.reconcile.exports import RunExports
from vcpo_operator.reconcile.reconciler import Outcome, Reconciler
from vcpo_operator.signals.client import LearnerLines

KEY = RunKey("default", "demo")
RUNS = "/apis/vcpo.dev/v1alpha1/namespaces/default/vcporuns"
RUN = f"{RUNS}/{KEY.name}"
PODS = "/api/v1/namespaces/default/pods"
DEPLOYMENT = "/apis/apps/v1/namespaces/default/deployments/demo-rollout-main"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
START_S = 1_800_000_000.0
USER_AGENT = "vcpo-operator"
DEFAULTS = OperatorDefaults(learner_image="learner:1", rollout_image="rollout:1")
CONFLICT = 409
_MOST_LOOKS = 20
_SERVED_S = 20.0
_POLL_S = 0.05

Document = dict[str, Any]


def run_body(name: str = KEY.name, **spec: Any) -> Document:
    """A run as a user writes it, with one group that may grow to three."""
    least = {
        "model": {"name": "m"},
        "environment": {"name": "countdown"},
        "steps": 10,
        "rollouts": [{"name": "main", "minReplicas": 1, "maxReplicas": 3}],
    }
    return {
        "apiVersion": "vcpo.dev/v1alpha1",
        "kind": "VCPORun",
        "metadata": {"name": name, "namespace": KEY.namespace},
        "spec": {**least, **spec},
    }


def report(phase: RunPhase = RunPhase.RUNNING, **signals: Any) -> LearnerReport:
    """What a learner says whose workers just keep up with it."""
    balanced = {
        "step": 5,
        "policy_version": 5,
        "ess_ratio_mean": 0.7,
        "on_policy_ess_ratio": 0.8,
        "lag_p50": 1,
        "lag_max": 2,
        "buffered": 8,
        "in_flight": 8,
        "batch_trajectories": 128,
        "admission_lag_steps": 8,
        "learner_idle_ratio": 0.1,
    }
    return LearnerReport(signals=RunSignals(**{**balanced, **signals}), phase=phase)


class ScriptedLines(LearnerLines):
    """Learners that say what `says` holds, and remember what they were told."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: START_S)
        self.says: LearnerReport | None = None
        self.throttles: list[int] = []
        self.tokens: dict[RunKey, str] = {}
        self.drains: list[str] = []
        self.left_over: int = 0
        """Trajectories still in flight once a learner drains."""

    async def set_token(self, key: RunKey, token: str) -> None:
        """Remember."""
        self.tokens[key] = token

    async def ask(self, key: RunKey, *, period_s: float) -> LearnerReport | None:
        """Answer at once."""
        return self.says

    async def throttle(self, key: RunKey, admission_lag_steps: int, reason: str) -> None:
        """Remember."""
        self.throttles.append(admission_lag_steps)

    async def drain(self, key: RunKey, reason: str) -> None:
        """Remember, and do it."""
        self.drains.append(reason)
        if self.says is not None:
            signals = replace(self.says.signals, in_flight=self.left_over)
            self.says = replace(self.says, signals=signals, phase=RunPhase.DRAINING)

    async def release(self, key: RunKey, worker: str) -> None:
        """Nobody holds a lease."""


@dataclass(slots=True, kw_only=True)
class OperatorScene:
    """A server, and an operator that can be replaced by a fresh one."""

    world: World
    client: KubeClient
    cluster: Cluster
    lines: ScriptedLines
    now_s: float = field(init=False)
    operator: Reconciler = field(init=False)

    def __post_init__(self) -> None:
        self.now_s = self.world.start_s
        self.restart_operator()

    @property
    def server(self) -> FakeApiServer:
        """The fake server, for what only it can do: faults, records, cut watches."""
        assert isinstance(self.world, FakeWorld)
        return self.world.server

    def restart_operator(self) -> None:
        """An operator that remembers nothing."""
        self.operator = Reconciler(
            view=self.world.view,
            executor=Executor(self.cluster, self.lines),
            lines=self.lines,
            defaults=DEFAULTS,
            exports=RunExports(OperatorMetrics()),
            clock=lambda: self.now_s,
        )

    async def look(self, key: RunKey = KEY) -> Outcome:
        """One look at a run; the cluster's controllers have answered when this returns."""
        await self.world.refresh()
        outcome = await self.operator.reconcile(key)
        await self.world.settled()
        return outcome

    async def settle(self, key: RunKey = KEY) -> Outcome:
        """Look until a look writes nothing; an operator that meets trouble is replaced."""
        for _ in range(_MOST_LOOKS):
            before = await self.world.mark()
            outcome = await self.look(key)
            if outcome.trouble:
                assert isinstance(self.world, FakeWorld), outcome.trouble
                self.server.faults.clear()
                self.restart_operator()
            elif await self.world.mark() == before:
                return outcome
        raise AssertionError(f"the operator still writes after {_MOST_LOOKS} looks")

    async def rest(self, key: RunKey = KEY) -> None:
        """Settle, let the time pass after which numbers are worth a write, and settle again."""
        await self.settle(key)
        self.now_s += PROGRESS_PERIOD_S
        await self.settle(key)

    async def create(self, **spec: Any) -> None:
        """Apply the run."""
        await self.client.create(RUNS, run_body(**spec))

    async def edit(self, **spec: Any) -> None:
        """Change the run's spec."""
        await self.client.merge_patch(RUN, {"spec": spec})

    async def place(self, pod: str) -> None:
        """Bind a pod to a node, as the scheduler does."""
        target = {"apiVersion": "v1", "kind": "Node", "name": "node-0"}
        body = {"metadata": {"name": pod}, "target": target}
        await self.client.create(f"{PODS}/{pod}/binding", body)

    async def run(self) -> Document:
        """The run as it is now."""
        return await self.client.get(RUN)

    async def replicas(self) -> int:
        """Workers that the group's Deployment asks for."""
        deployment = await self.client.get(DEPLOYMENT)
        return int(deployment["spec"]["replicas"])

    async def objects(self) -> dict[str, Document]:
        """The namespace's objects, without what differs from one time to another."""
        return {
            f"{plural}/{body['metadata']['name']}": _timeless(body)
            for plural, body in await self.world.objects()
            if plural not in _UNCOUNTED
        }


_UNCOUNTED = ("events", "pods", "replicasets")
"""Not compared: told as often as told, or named at random by controllers."""

_FLEETING = {
    "creationTimestamp",
    "generation",
    "managedFields",
    "observedGeneration",
    "podUid",
    "resourceVersion",
    "scaled_s",
    "subPath",
    "token",
    "uid",
    "updateTime",
}


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in _FLEETING and not _is_digest(k)}
        return {key: _timeless(child) for key, child in kept.items()}
    if isinstance(value, list):
        return [_timeless(item) for item in value]
    return value


def _is_digest(key: str) -> bool:
    """Digests cover the owner's uid, and revisions the number of attempts."""
    return key.endswith(("-hash", "Revision", "/revision"))


@asynccontextmanager
async def operator_scene(
    endpoint: Endpoint | None = None,
    *,
    tokens: dict[str, User] | None = None,
    token: str | None = None,
) -> AsyncIterator[OperatorScene]:
    """An operator before a server that knows our kind.

    endpoint: a real server, emptied of runs afterwards; None starts a fake one.
    tokens: those that the fake one knows. token: the operator's; None makes it the administrator.
    """
    async with _world(endpoint, tokens) as world, KubeClient(world.access) as admin:
        for definition in (crd(), scaler_crd()):
            await _define(admin, definition)
        cluster = connect(world, token)
        try:
            yield OperatorScene(world=world, client=admin, cluster=cluster, lines=ScriptedLines())
        finally:
            cluster.close()


@asynccontextmanager
async def _world(endpoint: Endpoint | None, tokens: dict[str, User] | None) -> AsyncIterator[World]:
    if endpoint is None:
        async with FakeApiServer(tokens=tokens, clock=fake_clock(START_S)) as server:
            yield FakeWorld(server, START_S)
        return
    async with KubeClient(access_to(endpoint)) as client:
        world = RealWorld(endpoint, client)
        try:
            yield world
        finally:
            await world.cleared()


async def _define(admin: KubeClient, definition: Document) -> None:
    """Make a kind known, and wait until it is served: that takes a real server a moment."""
    try:
        await admin.create(DEFINITIONS, definition)
    except ApiStatusError as error:
        if error.code != CONFLICT:  # a real server keeps it from one test to the next
            raise
    plural = definition["spec"]["names"]["plural"]
    async with asyncio.timeout(_SERVED_S):
        while True:
            try:
                await admin.get(f"/apis/vcpo.dev/v1alpha1/{plural}")
            except ApiStatusError:
                await asyncio.sleep(_POLL_S)
            else:
                return


def connect(world: World, token: str | None) -> Cluster:
    """The operator's client. token: None is the administrator's."""
    settings = client.Configuration(host=world.access.url)
    settings.retries = False
    if world.certificate is not None:
        settings.ssl_ca_cert = str(world.certificate)
    if token is None:
        token = world.access.token
    if token is not None:
        settings.api_key = {"authorization": f"Bearer {token}"}
    api_client = client.ApiClient(settings)
    api_client.user_agent = USER_AGENT
    return Cluster(api_client, timeout_s=5.0)


@asynccontextmanager
async def whole_operator(
    scene: OperatorScene, *, token: str | None = None, namespaces: Sequence[str] = ()
) -> AsyncIterator[None]:
    """The operator as its process runs it, kopf's watches included; its learners never answer.

    It must end in the task that began it: kopf cancels tasks younger than itself.
    """
    world = scene.world
    cluster = connect(world, token)
    operator = Operator(
        Options(defaults=DEFAULTS, namespaces=namespaces),
        cluster,
        OperatorMetrics(),
        address_of=lambda _: "127.0.0.1:9",
        login=lambda **_: kopf.ConnectionInfo(
            server=world.access.url,
            ca_path=None if world.certificate is None else str(world.certificate),
            token=token or world.access.token,
        ),
    )
    stop = asyncio.Event()
    running = asyncio.create_task(operator.run(stop))
    try:
        yield
    finally:
        stop.set()
        await running
        cluster.close()
