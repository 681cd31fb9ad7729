"""The leader lease: of several operators at most one acts. Optional.

It is a Lease of coordination.k8s.io, acquired and renewed as client-go does. A holder counts as
gone when the object has not changed for its duration by the local clock, so machines' clocks need
not agree. Acquiring replaces the version that was judged, so of two candidates one is refused. Two
holders for a moment do no harm, since actions follow from what is there; the lease only saves work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from vcpo_operator.cluster_api.client import ApiError, Cluster, Document, Resource

_LOGGER = logging.getLogger(__name__)
DURATION_S: Final = 30
RENEW_PERIOD_S: Final = 10.0


class LeaseLostError(Exception):
    """Somebody else holds the lease, or it was not renewed in time; the process must end."""


@dataclass(slots=True, kw_only=True)
class LeaderLease:
    """One operator's candidacy for a Lease object. One owner: the operator's event loop."""

    cluster: Cluster
    namespace: str
    name: str
    identity: str
    """Unique among the operators, such as the name of the pod."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    _version: str = ""
    _changed_s: float = 0.0

    async def acquire(self) -> None:
        """Wait until this operator holds the lease; errors of the API server are retried."""
        while True:
            try:
                if await self.try_acquire():
                    break
            except ApiError as error:
                _LOGGER.warning("lease %s/%s: %s", self.namespace, self.name, error)
            await asyncio.sleep(RENEW_PERIOD_S / 5)
        _LOGGER.info("acquired the lease %s/%s", self.namespace, self.name)

    async def renew(self) -> None:
        """Renew the lease until it is lost.

        Raises: LeaseLostError when somebody else holds the lease, or soon may.
        """
        renewed_s = self.clock()
        while True:
            await asyncio.sleep(RENEW_PERIOD_S)
            try:
                if not await self.try_acquire():
                    raise LeaseLostError(f"lease {self.name}: somebody else holds it")
                renewed_s = self.clock()
            except ApiError as error:
                if self.clock() - renewed_s > DURATION_S * 2 / 3:
                    raise LeaseLostError(f"lease {self.name}: not renewed: {error}") from error

    async def try_acquire(self) -> bool:
        """Acquire or renew the lease if that is allowed; return whether this operator holds it.

        Raises: ApiError.
        """
        resource = self._resource(self.name)
        found = await self.cluster.get(resource)
        if found is not None and not self._may_acquire(found):
            return False
        try:
            await self._write(resource, found)
        except ApiError as error:
            if error.is_gone:
                return False
            raise
        return True

    async def release(self) -> None:
        """Give the lease back, so that the next holder need not wait for its end."""
        resource = self._resource(self.name)
        try:
            found = await self.cluster.get(resource)
            if found is not None and found["spec"].get("holderIdentity") == self.identity:
                await self._write(resource, found, holder="")
        except ApiError as error:
            _LOGGER.warning("lease %s/%s: not given back: %s", self.namespace, self.name, error)

    def _resource(self, name: str) -> Resource:
        return Resource(
            api_version="coordination.k8s.io/v1",
            plural="leases",
            namespace=self.namespace,
            name=name,
        )

    def _may_acquire(self, lease: Document) -> bool:
        version = lease["metadata"]["resourceVersion"]
        if version != self._version:
            self._version, self._changed_s = version, self.clock()
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") in {None, "", self.identity}:
            return True
        duration_s = float(spec.get("leaseDurationSeconds") or DURATION_S)
        return self.clock() - self._changed_s >= duration_s

    async def _write(
        self, resource: Resource, found: Document | None, *, holder: str | None = None
    ) -> None:
        """Write the lease. holder: None is this operator; empty frees it."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        metadata: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        spec: dict[str, Any] = {
            "holderIdentity": self.identity if holder is None else holder,
            "leaseDurationSeconds": DURATION_S,
            "renewTime": now,
        }
        body = {"apiVersion": resource.api_version, "kind": "Lease", "spec": spec}
        if found is None:
            await self.cluster.create(self._resource(""), {**body, "metadata": metadata})
            return
        metadata["resourceVersion"] = found["metadata"]["resourceVersion"]
        await self.cluster.replace(resource, {**body, "metadata": metadata})


_GRACE_S = 1.0
"""How long a probe that is being answered may keep the address in use."""


@contextlib.asynccontextmanager
async def serve_standby_probe(endpoint: str | None) -> AsyncIterator[None]:
    """Answer the liveness probe while kopf does not: before the operator leads.

    On exit the address is free again.
    endpoint: `http://host:port/path`; None serves nothing.
    Raises: OSError when the address is not available.
    """
    if endpoint is None:
        yield
        return

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"state": "waits for the Lease"})

    parts = urlsplit(endpoint)
    application = web.Application()
    application.router.add_get(parts.path, answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=_GRACE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, parts.hostname, parts.port).start()
        yield
    finally:
        await runner.cleanup()
