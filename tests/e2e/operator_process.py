"""The operator's own process, as its image starts it, against any API server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.e2e.control_plane import ControlPlane
from tests.kube import kubelet_process
from tests.kube.kubelet_network import ClusterNetwork

_GRACE_S = 15.0


@contextlib.asynccontextmanager
async def operator_process(
    plane: ControlPlane, network: ClusterNetwork, root: Path
) -> AsyncIterator[kubelet_process.Process]:
    """Run `python -m vcpo_operator`. It finds learners through the stand-in's network."""
    process = await kubelet_process.start(
        [
            *(sys.executable, "-m", "vcpo_operator"),
            "--learner-image=vcpo-learner:here",
            "--rollout-image=vcpo-rollout:here",
            "--metrics-listen=127.0.0.1:0",
            "--liveness-listen=127.0.0.1:0",
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
        yield process
    finally:
        await process.stop(_GRACE_S)
        await watching
