"""The server side of the wire: one guarded gRPC server with health and reflection.

The guard stands before every method of `vcpo.*`: it wants a deadline and, where one is configured,
the shared token; and it turns `WireError`s into their gRPC status. Health and reflection stay open
for probes.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from vcpo.wire.errors import WireError
from vcpo.wire.limits import SERVER_OPTIONS

TOKEN_KEY = "authorization"  # noqa: S105 - the metadata key, not a secret

_Unary = Callable[[Any, Any], Awaitable[Any]]
_Stream = Callable[[Any, Any], AsyncIterator[Any]]


class WireServer:
    """A gRPC server with health, reflection and the guard; not yet listening.

    Register servicers on `grpc_server`, then `start`.
    """

    def __init__(self, *, token: str | None) -> None:
        self.grpc_server = grpc.aio.server(interceptors=[_Guard(token)], options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        self._services: tuple[str, ...] = ()

    async def start(self, address: str, services: Sequence[str], *, serving: bool = True) -> int:
        """Listen on `host:port` (port 0 picks a free one) and serve; returns the port.

        serving: what health checks are told from the start.

        Raises:
            OSError: when the address cannot be bound.
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
        """Tell health checks whether the services answer."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give those under way `grace_s` seconds, then end."""
        await self.set_serving(serving=False)
        await self.grpc_server.stop(grace_s)


class _Guard(grpc.aio.ServerInterceptor):
    """Refuses calls without deadline or token, and maps errors to statuses."""

    def __init__(self, token: str | None) -> None:
        self._expected = f"Bearer {token}" if token else None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/vcpo."):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._guard_stream(handler.unary_stream),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._guard_unary(handler.unary_unary),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guard_unary(self, method: _Unary) -> _Unary:
        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._admit(context)
            try:
                return await method(request, context)
            except WireError as error:
                await context.abort(error.status, str(error))

        return guarded

    def _guard_stream(self, method: _Stream) -> _Stream:
        async def guarded(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            await self._admit(context)
            try:
                async for response in method(request, context):
                    yield response
            except WireError as error:
                await context.abort(error.status, str(error))

        return guarded

    async def _admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._expected is not None:
            metadata = dict(context.invocation_metadata() or ())
            received = str(metadata.get(TOKEN_KEY, ""))
            if not hmac.compare_digest(received.encode(), self._expected.encode()):
                await context.abort(
                    grpc.StatusCode.UNAUTHENTICATED,
                    f"{TOKEN_KEY}: must be 'Bearer <token of the run>'; set VCPO_TOKEN",
                )
        if context.time_remaining() is None:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "deadline: every call must set a timeout"
            )
