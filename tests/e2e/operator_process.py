"""The operator's own process, as its image starts it, against any API server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.e2e.control_plane import ControlPlane
from tests.kube import kubelet_process
from tests.kube.kubelet_network import ClusterNetwork
from tests.kube.kubelet_probes import ProbeTarget, ask

_GRACE_S = 15.0
_START_S = 60.0
_POLL_S = 0.2


@contextlib.asynccontextmanager
async def operator_process(
    plane: ControlPlane, network: ClusterNetwork, root: Path
) -> AsyncIterator[kubelet_process.Process]:
    """Run `python -m vcpo_operator`. It finds learners through the stand-in's network."""
    health_port = free_port()
    process = await kubelet_process.start(
        [
            *(sys.executable, "-m", "vcpo_operator"),
            "--learner-image=vcpo-learner:here",
            "--rollout-image=vcpo-rollout:here",
            "--metrics-listen=127.0.0.1:0",
            f"--liveness-listen=127.0.0.1:{health_port}",
        ],
        environment={
            **os.environ,
            **network.variables("vcpo-system"),
            "KUBECONFIG": str(plane.kubeconfig),
        },
        directory=Path.cwd(),
        log=root / "operator.log",
    )
    watching = asyncio.create_task(process.wait())
    try:
        await _until_healthy(health_port, watching)
        yield process
    finally:
        await process.stop(_GRACE_S)
        await watching


def free_port() -> int:
    """A port of the loopback address that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def _until_healthy(port: int, watching: asyncio.Task[int]) -> None:
    probe = {"httpGet": {"path": "/healthz", "port": port}, "timeoutSeconds": 5}
    target = ProbeTarget(container={"name": "operator"}, pod_ip="127.0.0.1", execute=_refuse)
    async with asyncio.timeout(_START_S):
        while not await ask(probe, target):
            if watching.done():
                raise RuntimeError(f"the operator ended with {watching.result()}; see its log")
            await asyncio.sleep(_POLL_S)


async def _refuse(command: list[str]) -> int:
    raise AssertionError(f"no command is run in the operator: {command}")
