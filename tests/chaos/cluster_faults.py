"""Faults between the operator's process and the API server, and of both.

The API server is the fake one of the tests; the operator is the process of its image, and reaches
the server through the same proxy as workers reach a learner. After each fault the run's spec is
edited, and the operator must come to what it asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from tests.chaos.fault import Injected, NotInjectedError
from tests.chaos.kinds import Kind
from tests.chaos.live_run import MARK_VARIABLE, SIGN_S, holds
from tests.chaos.pace import Pace, Silence
from tests.chaos.proxy import TcpProxy
from tests.fakes.kubelet.client import KubeClient
from tests.fakes.kubelet.settings import ApiAccess
from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fakes.kubernetes.faults import Effect, Fault, broken, overloaded, stale
from tests.fixtures.ports import free_port
from vcpo_operator.crd import run_crd

_RUNS: Final = "/apis/vcpo.dev/v1alpha1/namespaces/default/vcporuns"
_DEFINITIONS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_OPERATOR_AGENT: Final = "OpenAPI-Generator"
"""How the operator's own calls name themselves; kopf's watches have another name."""
_RESTART_S = 0.3
_GRACE_S = 30.0
_RUN: Final = {
    "apiVersion": "vcpo.dev/v1alpha1",
    "kind": "VCPORun",
    "metadata": {"name": "chaos", "namespace": "default"},
    "spec": {
        "model": {"name": "m"},
        "environment": {"name": "countdown"},
        "steps": 10,
        "rollouts": [{"name": "main", "minReplicas": 1, "maxReplicas": 3}],
    },
}


@dataclass(slots=True)
class LiveCluster:
    """An API server with one run, and the operator's process."""

    folder: Path
    server: FakeApiServer = field(default_factory=FakeApiServer)
    operator: subprocess.Popen[bytes] = field(init=False)
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    metrics_port: int = field(default_factory=free_port)
    _health_port: int = field(default_factory=free_port)
    proxy: TcpProxy = field(init=False)
    client: KubeClient = field(init=False)
    pace: Pace = field(default_factory=Pace)
    """A step is an edit that the operator has followed."""
    _supervision: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.server.__aenter__()
        self.proxy = TcpProxy(int(self.server.url.rpartition(":")[2]))
        await self.proxy.__aenter__()
        self.client = KubeClient(ApiAccess(url=self.server.url))
        await self.client.__aenter__()
        await self.client.create(_DEFINITIONS, run_crd())
        await self.client.create(_RUNS, _RUN)
        kubeconfig = self.server.kubeconfig()
        kubeconfig["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{self.proxy.port}"
        (self.folder / "kubeconfig.json").write_text(json.dumps(kubeconfig))
        self.operator = self._start()
        self._supervision = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        self.operator.send_signal(signal.SIGCONT)
        self.operator.terminate()
        if not await holds(lambda: self.operator.poll() is not None, _GRACE_S):
            self.operator.kill()
        self.operator.wait()
        await self.client.__aexit__(None, None, None)
        await self.proxy.__aexit__()
        await self.server.__aexit__(None, None, None)

    async def edit(self) -> int:
        """Suspend or resume the run; return the generation of its spec."""
        suspended = (await self.run())["spec"].get("suspend", False)
        body = {"spec": {"suspend": not suspended}}
        return int((await self.client.merge_patch(self._path, body))["metadata"]["generation"])

    async def run(self) -> Mapping[str, Any]:
        """The run as the server has it."""
        return await self.client.get(self._path)

    async def progress(self) -> bool:
        """Edit the run, and wait until its status and its learner follow; False: it hangs."""
        generation = await self.edit()
        begun_s = time.monotonic()
        silence = Silence(pace=self.pace, since_s=begun_s, last=self._sign_of_life())
        while not silence.is_hang(time.monotonic(), is_starting=not self._serves()):
            run = await self.run()
            seen = (run.get("status") or {}).get("observedGeneration", 0)
            if seen == generation and self._learner_replicas() == int(not run["spec"]["suspend"]):
                silence.hear(generation, time.monotonic())
                taken_s = time.monotonic() - begun_s
                # The first edit waits for the start, which is long beside what a later one takes.
                (self.pace.steps_s if self.pace.starts_s else self.pace.starts_s).append(taken_s)
                return True
            silence.hear(self._sign_of_life(), time.monotonic())
            await asyncio.sleep(0.2)
        return False

    def _sign_of_life(self) -> Hashable:
        """Changes when an operator starts or serves."""
        return self.operator.pid, self._serves()

    def _serves(self) -> bool:
        """Whether the operator listens."""
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.metrics_port), timeout=1.0).close()
            return True
        return False

    async def num_answers(self, code: int) -> float:
        """Calls of the operator that had this status, as its metric counts them; 0: no answer."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        try:
            text = await asyncio.to_thread(_read, url)
        except OSError:
            return 0.0
        pattern = rf'^vcpo_operator_api_requests_total\{{[^}}]*code="{code}"[^}}]*\}} (\S+)$'
        return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))

    async def leftovers(self) -> list[str]:
        """Delete the run; what is left of it but the volume of the trained model."""
        await self.client.delete(self._path)
        await self.server.wait_until_settled()
        left: list[str] = []
        for path in ("api/v1/{}/services", "api/v1/{}/configmaps", "api/v1/{}/secrets",
                     "api/v1/{}/pods", "apis/apps/v1/{}/statefulsets",
                     "apis/apps/v1/{}/deployments"):  # fmt: skip
            listed = await self.client.get(f"/{path.format('namespaces/default')}")
            left += [f"{path.rpartition('/')[2]}/{one['metadata']['name']}"
                     for one in listed["items"]]  # fmt: skip
        return left

    @property
    def _path(self) -> str:
        return f"{_RUNS}/{_RUN['metadata']['name']}"

    def _learner_replicas(self) -> int | None:
        found = self.server.api.store.get(("apps", "statefulsets"), "default", "chaos-learner")
        return None if found is None else int(found["spec"]["replicas"])

    async def _supervise(self) -> None:
        """Start the operator again when it ended, as its Deployment does."""
        self.may_start.set()
        while True:
            await self.may_start.wait()
            if self.operator.poll() is not None:
                self.operator = self._start()
            await asyncio.sleep(_RESTART_S)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "vcpo_operator", "--learner-image=l", "--rollout-image=r"]
        command += [f"--metrics-listen=127.0.0.1:{self.metrics_port}"]
        command += [f"--liveness-listen=127.0.0.1:{self._health_port}"]
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.folder / "kubeconfig.json"),
            "PYTHONPATH": os.pathsep.join(sys.path),
            MARK_VARIABLE: str(self.folder),
        }
        with (self.folder / "operator.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=self.folder
            )


Inject = Callable[[LiveCluster, random.Random], Awaitable[Injected]]


def refuse(what: str, code: int, **fields: Any) -> Inject:
    """Some of the operator's next writes fail; its metric counts the answers.

    code: the status that the operator sees; 0: none.
    """

    async def inject(cluster: LiveCluster, draw: random.Random) -> Injected:
        before = await cluster.num_answers(code)
        fault = Fault(
            user_agent=_OPERATOR_AGENT,
            verb="patch",
            resource=draw.choice(["statefulsets", "vcporuns", ""]),
            times=draw.randint(5, 8),
            **fields,
        )
        cluster.server.faults.add(fault)
        try:
            await cluster.edit()
            if not await holds(lambda: fault.seen > 0, SIGN_S):
                raise NotInjectedError("the operator wrote nothing")
            is_shown = await _counted(cluster, code, before)
        finally:
            cluster.server.faults.clear()
        sign = f"vcpo_operator_api_requests_total counts {code}"
        return Injected(what=f"{what}: {fault.resource}", sign=sign, is_shown=is_shown)

    return inject


async def _counted(cluster: LiveCluster, code: int, before: float) -> bool:
    """Wait until the operator's metric has counted an answer."""
    for _ in range(int(SIGN_S / 0.5)):
        if await cluster.num_answers(code) > before:
            return True
        await asyncio.sleep(0.5)
    return False


async def expire_watches(cluster: LiveCluster, _: random.Random) -> Injected:
    """Watches end, and the history that they would go on from is forgotten: 410."""
    cluster.server.watches.close_all()
    await cluster.edit()
    cluster.server.compact()
    return Injected(what="watches ended, history forgotten")


async def cut_watches(cluster: LiveCluster, _: random.Random) -> Injected:
    """Every connection to the API server ends at once."""
    if not (number := cluster.proxy.cut()):
        raise NotInjectedError("the operator is not connected")
    return Injected(what=f"{number} connections cut")


async def restart_server(cluster: LiveCluster, draw: random.Random) -> Injected:
    """The API server is away for a while, and has forgotten its history when it is back."""
    refused = cluster.proxy.num_refused
    cluster.proxy.refuses = True
    try:
        cluster.proxy.cut()
        await cluster.edit()
        if not await holds(lambda: cluster.proxy.num_refused > refused, SIGN_S):
            raise NotInjectedError("the operator did not call")
        await asyncio.sleep(draw.uniform(0.5, 4.0))
        cluster.server.compact()
    finally:
        cluster.proxy.refuses = False
    return Injected(what="API server restarted")


async def kill_operator(cluster: LiveCluster, draw: random.Random) -> Injected:
    """The operator dies while it works on a change."""
    operator = cluster.operator
    await cluster.edit()
    await asyncio.sleep(draw.uniform(0.0, 0.5))
    operator.kill()
    await holds(lambda: operator.poll() is not None, SIGN_S)
    shown = operator.poll() == -signal.SIGKILL
    return Injected(what="operator killed", sign="its exit status", is_shown=shown)


async def stop_operator(cluster: LiveCluster, draw: random.Random) -> Injected:
    """The operator stands still for a while, in which the run changes."""
    if cluster.operator.poll() is not None:
        raise NotInjectedError("the operator restarts")
    operator = cluster.operator
    operator.send_signal(signal.SIGSTOP)
    try:
        await cluster.edit()
        await asyncio.sleep(draw.uniform(1.0, 5.0))
    finally:
        operator.send_signal(signal.SIGCONT)
    return Injected(what="operator stopped")


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5.0) as response:
        return response.read().decode()


INJECTORS: Final[Mapping[Kind, Inject]] = {
    Kind.API_CONFLICT: refuse("409", 409, error=stale()),
    Kind.API_BUSY: refuse("429", 429, error=overloaded()),
    Kind.API_BROKEN: refuse("500", 500, error=broken()),
    Kind.API_REPLY_LOST: refuse("reply lost", 0, effect=Effect.LOSE_REPLY),
    Kind.API_DROPPED: refuse("connection dropped", 0, effect=Effect.DROP),
    Kind.WATCH_EXPIRED: expire_watches,
    Kind.WATCH_CUT: cut_watches,
    Kind.API_RESTARTED: restart_server,
    Kind.OPERATOR_KILLED: kill_operator,
    Kind.OPERATOR_STOPPED: stop_operator,
}
