"""What a user does: apply, edit, delete. With kubectl where there is one, else by requests."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.fakes.kubelet.client import KubeClient
from tests.fakes.kubelet.environment import JsonObject

NAMESPACE = "default"
RUNS = f"/apis/vcpo.dev/v1alpha1/namespaces/{NAMESPACE}/vcporuns"
_COLLECTIONS = {
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "ConfigMap": f"/api/v1/namespaces/{NAMESPACE}/configmaps",
    "VCPORun": RUNS,
}


def load(path: Path) -> JsonObject:
    """Read a manifest."""
    document: JsonObject = YAML(typ="safe", pure=True).load(path.read_text())
    return document


def config_map(name: str, folder: Path) -> JsonObject:
    """What `kubectl create configmap NAME --from-file=FOLDER` makes."""
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    binary = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "binaryData": binary,
    }


class User:
    """Somebody with a kubeconfig. kubectl: path of the program; None does without."""

    def __init__(self, kubeconfig: Path, client: KubeClient, kubectl: str | None) -> None:
        self._kubeconfig = kubeconfig
        self._client = client
        self._kubectl = kubectl

    async def apply(self, body: JsonObject) -> None:
        """`kubectl apply --server-side`: unlike the old way, it bears a large object."""
        if self._kubectl is not None:
            await self._run("apply", "--server-side", "--filename=-", text=json.dumps(body))
        else:
            await self._client.create(_COLLECTIONS[body["kind"]], body)

    async def apply_file(self, path: Path) -> None:
        """`kubectl apply -f`."""
        if self._kubectl is not None:
            await self._run("apply", f"--filename={path}")
        else:
            await self.apply(load(path))

    async def edit(self, run: str, spec: Mapping[str, Any]) -> None:
        """`kubectl patch vcporun --type=merge`."""
        await self._client.merge_patch(f"{RUNS}/{run}", {"spec": spec})

    async def delete(self, run: str) -> None:
        """`kubectl delete vcporun`."""
        if self._kubectl is not None:
            await self._run("delete", "vcporun", run, "--timeout=60s")
        else:
            await self._client.delete(f"{RUNS}/{run}")

    async def table(self) -> str:
        """`kubectl get vcporuns`; empty without kubectl."""
        return "" if self._kubectl is None else await self._run("get", "vcporuns")

    async def events(self, run: str) -> list[JsonObject]:
        """`kubectl events --for vcporun/RUN -o json`."""
        listed = await self._client.get(f"/api/v1/namespaces/{NAMESPACE}/events")
        return [each for each in listed["items"] if each["involvedObject"]["name"] == run]

    async def _run(self, *arguments: str, text: str = "") -> str:
        assert self._kubectl is not None
        process = await asyncio.create_subprocess_exec(
            *(self._kubectl, f"--kubeconfig={self._kubeconfig}", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate(text.encode())
        if process.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {output.decode()}")
        return output.decode()
