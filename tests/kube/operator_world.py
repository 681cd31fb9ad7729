"""The server that an operator under test looks at: the fake one, or a real control plane.

Both answer the same questions: how to reach it, what is there now, whether anything was written,
and when its controllers have dealt with everything.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Hashable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from vcpo_operator.watch import index_view as view

from tests.kube.fake_api_server import FakeApiServer
from tests.kube.kubelet_client import ApiStatusError, KubeClient
from tests.kube.kubelet_settings import ApiAccess
from tests.kube.operator_view import ListedView, StoreView
from tests.kube.real_api_server import Endpoint

Document = dict[str, Any]

NAMESPACE = "default"
COLLECTIONS = {
    view.RUNS: f"/apis/vcpo.dev/v1alpha1/namespaces/{NAMESPACE}/vcporuns",
    view.PODS: f"/api/v1/namespaces/{NAMESPACE}/pods",
    "replicasets": f"/apis/apps/v1/namespaces/{NAMESPACE}/replicasets",
    "configmaps": f"/api/v1/namespaces/{NAMESPACE}/configmaps",
    **{
        kind.plural: "/".join(
            (
                "/apis" if "/" in kind.api_version else "/api",
                kind.api_version,
                "namespaces",
                NAMESPACE,
                kind.plural,
            )
        )
        for kind in view.WATCHED
    },
}
"""Paths of everything that a run or the controllers behind it make."""

_PATIENCE_S = 30.0
_POLL_S = 0.05


class World(Protocol):
    """A server as the scene uses it."""

    access: ApiAccess
    certificate: Path | None
    start_s: float
    """Unix time at which the operator's clock starts."""
    view: StoreView | ListedView

    async def refresh(self) -> None:
        """Bring the view up to date."""

    async def settled(self) -> None:
        """Wait until the controllers have answered every write."""

    async def mark(self) -> Hashable:
        """Equal to an earlier mark as long as nothing was written in between."""

    async def objects(self) -> Iterable[tuple[str, Document]]:
        """The namespace's objects by plural name."""


class FakeWorld:
    """A fake server whose clock stands still."""

    certificate = None

    def __init__(self, server: FakeApiServer, start_s: float) -> None:
        self.server = server
        self.start_s = start_s
        self.access = ApiAccess(url=server.url)
        self.view = StoreView(server)

    async def refresh(self) -> None:
        """Nothing to do: the view reads the store itself."""

    async def settled(self) -> None:
        """Wait for the fake's controllers."""
        await self.server.settled()

    async def mark(self) -> Hashable:
        """The store's revision."""
        return self.server.api.store.revision

    async def objects(self) -> Iterable[tuple[str, Document]]:
        """What the store holds."""
        everything = self.server.api.store.everything()
        return [
            (plural, body)
            for (_, plural), body in everything
            if body["metadata"].get("namespace") == NAMESPACE
        ]


class RealWorld:
    """A real control plane without a kubelet: pods are made and stay unscheduled."""

    def __init__(self, endpoint: Endpoint, client: KubeClient) -> None:
        self.access = access_to(endpoint)
        self.certificate = endpoint.certificate
        self.start_s = time.time()
        self.view = ListedView()
        self._client = client

    async def refresh(self) -> None:
        """List everything."""
        self.view.listed = await self._listed()

    async def settled(self) -> None:
        """Poll until every controller has seen every generation and made or ended its pods.

        Raises:
            TimeoutError: when that takes longer than half a minute.
        """
        async with asyncio.timeout(_PATIENCE_S):
            while not _is_settled(await self._listed()):
                await asyncio.sleep(_POLL_S)

    async def mark(self) -> Hashable:
        """Uid and version of every object."""
        listed = await self._listed()
        metadata = [body["metadata"] for bodies in listed.values() for body in bodies]
        return frozenset((each["uid"], each["resourceVersion"]) for each in metadata)

    async def objects(self) -> Iterable[tuple[str, Document]]:
        """What the lists hold of runs; a namespace has objects of its own as well."""
        listed = await self._listed()
        return [
            (plural, body)
            for plural, bodies in listed.items()
            for body in bodies
            if plural == view.RUNS or view.run_key(body) is not None
        ]

    async def cleared(self) -> None:
        """Delete every run and what outlives it, and wait until all is gone."""
        for plural in (view.RUNS, "persistentvolumeclaims"):
            for body in (await self._client.get(COLLECTIONS[plural]))["items"]:
                await self._delete(f"{COLLECTIONS[plural]}/{body['metadata']['name']}")
        async with asyncio.timeout(_PATIENCE_S):
            while list(await self.objects()):
                await asyncio.sleep(_POLL_S)

    async def _delete(self, path: str) -> None:
        try:
            await self._client.delete(path)
        except ApiStatusError as error:
            if error.code != 404:  # gone with its owner meanwhile
                raise

    async def _listed(self) -> dict[str, list[Document]]:
        answers = await asyncio.gather(*map(self._client.get, COLLECTIONS.values()))
        return {
            plural: answer["items"] for plural, answer in zip(COLLECTIONS, answers, strict=True)
        }


def fake_clock(start_s: float) -> partial[datetime]:
    """A clock that stands still."""
    return partial(datetime.fromtimestamp, start_s, UTC)


def access_to(endpoint: Endpoint) -> ApiAccess:
    """How to reach a real server as its administrator."""
    tls = ssl.create_default_context(cafile=endpoint.certificate) if endpoint.certificate else None
    return ApiAccess(url=endpoint.url, token=endpoint.token, tls=tls)


def _is_settled(listed: dict[str, list[Document]]) -> bool:
    bodies = [body for found in listed.values() for body in found]
    uids = {body["metadata"]["uid"] for body in bodies}
    owned = Counter(
        owner["uid"] for body in bodies for owner in body["metadata"].get("ownerReferences") or ()
    )
    if any("deletionTimestamp" in body["metadata"] for body in bodies) or owned.keys() - uids:
        return False
    scaled = [*listed["replicasets"], *listed["statefulsets"]]
    made = all(owned[body["metadata"]["uid"]] == body["spec"]["replicas"] for body in scaled)
    return made and all(map(_is_seen, [*scaled, *listed["deployments"]]))


def _is_seen(body: Document) -> bool:
    """Whether the controller speaks of this generation, and of all replicas that it asks for."""
    status, spec = body.get("status") or {}, body["spec"]
    seen = status.get("observedGeneration") == body["metadata"]["generation"]
    counted = status.get("replicas", 0) == spec["replicas"] or bool(spec.get("paused"))
    return seen and counted
