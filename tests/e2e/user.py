"""What a user does: apply, edit, delete."""

import base64
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
    """Somebody who applies, edits and deletes by requests."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def apply(self, body: JsonObject) -> None:
        await self._client.create(_COLLECTIONS[body["kind"]], body)

    async def edit(self, run: str, spec: Mapping[str, Any]) -> None:
        await self._client.merge_patch(f"{RUNS}/{run}", {"spec": spec})

    async def delete(self, run: str) -> None:
        await self._client.delete(f"{RUNS}/{run}")

    async def events(self, run: str) -> list[JsonObject]:
        listed = await self._client.get(f"/api/v1/namespaces/{NAMESPACE}/events")
        return [each for each in listed["items"] if each["involvedObject"]["name"] == run]
