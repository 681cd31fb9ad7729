"""The API server of the end-to-end run: the fake one, or a real one where it is installed."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kube.fake_api_server import FakeApiServer
from tests.kube.kubelet_settings import ApiAccess
from tests.kube.real_api_server import Endpoint, binaries_here, running


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    """A running API server with its controllers."""

    kind: str
    """`fake` or `real`."""
    access: ApiAccess
    kubeconfig: Path


@contextlib.asynccontextmanager
async def control_plane(root: Path) -> AsyncIterator[ControlPlane]:
    """Start a real control plane where `KUBEBUILDER_ASSETS` has a whole one, else the fake."""
    kubeconfig = root / "kubeconfig.json"
    binaries = binaries_here()
    if not isinstance(binaries, str) and binaries.controller_manager is not None:
        folder = root / "control-plane"
        folder.mkdir()
        with running(binaries, folder) as endpoint:
            kubeconfig.write_text(json.dumps(_kubeconfig(endpoint)))
            yield ControlPlane(kind="real", access=_access(endpoint), kubeconfig=kubeconfig)
        return
    async with FakeApiServer() as server:
        kubeconfig.write_text(json.dumps(server.kubeconfig()))
        access = ApiAccess(url=server.url)
        yield ControlPlane(kind="fake", access=access, kubeconfig=kubeconfig)


def _access(endpoint: Endpoint) -> ApiAccess:
    tls = ssl.create_default_context(cafile=endpoint.certificate)
    return ApiAccess(url=endpoint.url, token=endpoint.token, tls=tls)


def _kubeconfig(endpoint: Endpoint) -> dict[str, Any]:
    cluster = {"server": endpoint.url, "certificate-authority": str(endpoint.certificate)}
    context = {"cluster": "real", "user": "admin", "namespace": "default"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "real", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": endpoint.token}}],
        "contexts": [{"name": "real", "context": context}],
        "current-context": "real",
    }
