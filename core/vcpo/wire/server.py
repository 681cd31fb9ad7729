"""The server side of the wire: a gRPC server with guard, health service and reflection."""

import resource
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from vcpo.wire.access.roles import RoleKeys
from vcpo.wire.access.tls import CertificateFolder
from vcpo.wire.guard import Guard
from vcpo.wire.limits import MAX_CALLS, probe_options, server_options


class WireServer:
    """A gRPC server with guard, health service and reflection.

    Register servicers on `grpc_server`, then call `start`.
    """

    def __init__(self, *, keys: RoleKeys | None, guard: Guard | None = None) -> None:
        """Create the server.

        keys: the key of each role that is let in; None accepts every caller.
        guard: replaces the default guard with these keys.
        """
        self._guard = guard or Guard(keys)
        self.grpc_server = grpc.aio.server(
            interceptors=[self._guard],
            options=server_options(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        self._services: tuple[str, ...] = ()
        self._probed: grpc.aio.Server | None = None
        self.health_port = 0
        """Port of the health checks in plain text; 0 if there is none."""

    async def start(
        self,
        address: str,
        services: Sequence[str],
        *,
        serving: bool = True,
        certificates: CertificateFolder | None = None,
        health_address: str | None = None,
    ) -> int:
        """Listen on `host:port` (port 0 takes a free port), serve, and return the port.

        serving: whether health checks report SERVING from the start.
        certificates: those to serve with; None serves in plain text.
        health_address: where health checks, and nothing else, are answered in plain text too: the
            probes of Kubernetes know no TLS. None: nowhere.
        """
        self._services = tuple(services)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc_server)
        port = _bind(self.grpc_server, address, certificates)
        if health_address is not None:
            self._probed = grpc.aio.server(interceptors=[self._guard], options=probe_options())
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probed)
            self.health_port = _bind(self._probed, health_address, None)
            await self._probed.start()
        await self.grpc_server.start()
        await self.set_serving(serving=serving)
        return port

    async def set_serving(self, *, serving: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self.set_serving(serving=False)
        await self.grpc_server.stop(grace_s)
        if self._probed is not None:
            await self._probed.stop(0.0)


def _bind(server: grpc.aio.Server, address: str, certificates: CertificateFolder | None) -> int:
    try:
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, certificates.server_credentials())
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
