"""The lease: at most one operator acts, when several are run. Optional.

A Lease of coordination.k8s.io, taken and renewed as client-go does it: a holder counts as gone when
the object has not changed for its duration *by our own clock*, so that clocks of machines need not
agree; and who takes it replaces the version that was judged, so that of two takers one is refused.
Two holders for a moment would do no harm (every action is derived from what is there); the lease
saves the work, not the runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from vcpo_operator.cluster_api.client import ApiError, Cluster, Document, Resource

_LOGGER = logging.getLogger(__name__)
DURATION_S: Final = 30
RENEW_PERIOD_S: Final = 10.0


class LeaseLostError(Exception):
    """Somebody else holds the lease, or it could not be renewed in time; the process must end."""


@dataclass(slots=True, kw_only=True)
class LeaderLease:
    """One operator's claim on a Lease object."""

    cluster: Cluster
    namespace: str
    name: str
    identity: str
    """Unique among the operators, the pod's name for one."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    _version: str = ""
    _changed_s: float = 0.0

    async def take(self) -> None:
        """Wait until the lease is ours; an API server that does not answer is asked again."""
        while not await self._taken():
            await asyncio.sleep(RENEW_PERIOD_S / 5)
        _LOGGER.info("lease %s/%s is ours", self.namespace, self.name)

    async def keep(self) -> None:
        """Renew for ever.

        Raises: LeaseLostError when the lease is no longer ours, or may not be.
        """
        renewed_s = self.clock()
        while True:
            await asyncio.sleep(RENEW_PERIOD_S)
            try:
                if not await self.try_once():
                    raise LeaseLostError(f"lease {self.name}: somebody else holds it")
                renewed_s = self.clock()
            except ApiError as error:
                if self.clock() - renewed_s > DURATION_S * 2 / 3:
                    raise LeaseLostError(f"lease {self.name}: not renewed: {error}") from error

    async def try_once(self) -> bool:
        """Take or renew the lease if that is allowed; whether it is ours."""
        resource = Resource(
            api_version="coordination.k8s.io/v1",
            plural="leases",
            namespace=self.namespace,
            name=self.name,
        )
        found = await self.cluster.get(resource)
        if found is not None and not self._may_take(found):
            return False
        try:
            await self._write(resource, found)
        except ApiError as error:
            if error.is_gone:
                return False
            raise
        return True

    async def _taken(self) -> bool:
        try:
            return await self.try_once()
        except ApiError as error:
            _LOGGER.warning("lease %s/%s: %s", self.namespace, self.name, error)
            return False

    def _may_take(self, lease: Document) -> bool:
        version = lease["metadata"]["resourceVersion"]
        if version != self._version:
            self._version, self._changed_s = version, self.clock()
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") in {None, "", self.identity}:
            return True
        duration_s = float(spec.get("leaseDurationSeconds") or DURATION_S)
        return self.clock() - self._changed_s >= duration_s

    async def _write(self, resource: Resource, found: Document | None) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        metadata: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        spec: dict[str, Any] = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": DURATION_S,
            "renewTime": now,
        }
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        if found is None:
            collection = Resource(
                api_version="coordination.k8s.io/v1", plural="leases", namespace=self.namespace
            )
            await self.cluster.create(collection, {**body, "metadata": metadata, "spec": spec})
            return
        metadata["resourceVersion"] = found["metadata"]["resourceVersion"]
        await self.cluster.replace(resource, {**body, "metadata": metadata, "spec": spec})
