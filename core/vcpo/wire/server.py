"""The server side of the wire: a gRPC server with guard, health service and reflection."""

from __future__ import annotations

import resource
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from vcpo.wire.access.roles import RoleKeys
from vcpo.wire.call_meter import CallMeter
from vcpo.wire.guard import Guard
from vcpo.wire.limits import MAX_CALLS, server_options


class WireServer:
    """A gRPC server with guard, health service and reflection.

    Register servicers on `grpc_server`, then call `start`.
    """

    def __init__(
        self, *, keys: RoleKeys | None, guard: Guard | None = None, meter: CallMeter | None = None
    ) -> None:
        """Create the server.

        keys: the key of each role that is let in; None accepts every caller.
        guard: replaces the default guard with these keys.
        meter: counts and times the calls; None for a server without metrics.
        """
        self.guard = guard or Guard(keys)
        self.grpc_server = grpc.aio.server(
            interceptors=[self.guard] if meter is None else [meter, self.guard],
            options=server_options(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        self._services: tuple[str, ...] = ()

    async def start(self, address: str, services: Sequence[str], *, serving: bool = True) -> int:
        """Listen on `host:port` (port 0 takes a free port), serve, and return the port.

        serving: whether health checks report SERVING from the start.

        Raises:
            OSError: if the address cannot be bound.
        """
        self._services = tuple(services)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc_server)
        try:
            port = self.grpc_server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await self.grpc_server.start()
        await self.set_serving(serving=serving)
        return port

    async def set_serving(self, *, serving: bool) -> None:
        """Set whether health checks report SERVING."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait up to `grace_s` seconds for running calls, then stop."""
        await self.set_serving(serving=False)
        await self.grpc_server.stop(grace_s)
