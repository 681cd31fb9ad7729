"""The guard of every method: it checks key, role, deadline and message size, and maps errors.

The guard checks a call before its message is read. gRPC reads a message only on request, beyond a
window of about 64 KiB, so messages of unauthorized callers are never read. For this reason every
method is registered with a stream of requests, of which the guard reads one; on the wire there is
no difference.

```
key ---> role ---> deadline ---> slot to read ---> message ---> method
```

Health checks need no key, so that probes can call them, but a deadline: a caller that opens no
window for the answer would hold the call for ever. All services of a server have the same health,
so the guard does not read a probe's message. Reflection needs a key, of any role.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from vcpo.wire.access.roles import AUTHORIZATION, METHODS_OF, RoleKeys, role_of
from vcpo.wire.errors import WireError
from vcpo.wire.limits import (
    MAX_CONTROL_MESSAGES_READ,
    MAX_DEADLINE_S,
    MAX_MESSAGES_READ,
    MAX_PROBE_S,
    READ_TIMEOUT_S,
)
from vcpo.wire.v1 import control_pb2

_Context = grpc.aio.ServicerContext[Any, Any]
_PROBE = f"/{health.SERVICE_NAME}/Check"
_OURS = "/vcpo."
_CONTROL = f"/{control_pb2.DESCRIPTOR.services_by_name['ControlService'].full_name}/"


class _RefusedError(WireError):
    """A call that the guard refuses."""

    def __init__(self, status: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.status = status


class Guard(grpc.aio.ServerInterceptor):
    """Interceptor that checks every call and converts a `WireError` to its gRPC status.

    keys: the key of each role that is let in; None accepts every caller.
    read_timeout_s: time for a message to arrive.
    """

    def __init__(self, keys: RoleKeys | None, *, read_timeout_s: float = READ_TIMEOUT_S) -> None:
        self._keys = keys
        self._read_timeout_s = read_timeout_s
        self._reading = asyncio.Semaphore(MAX_MESSAGES_READ)
        self._reading_control = asyncio.Semaphore(MAX_CONTROL_MESSAGES_READ)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler behind the guard."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if method == _PROBE:
            return self._guard_probe(handler)
        metadata = dict(handler_call_details.invocation_metadata or ())
        refusal = self._refusal(method, metadata)
        if refusal is not None:
            return grpc.stream_stream_rpc_method_handler(_refusing(refusal))
        if not method.startswith(_OURS):  # reflection and other services of the libraries
            return handler
        reading = self._reading_control if method.startswith(_CONTROL) else self._reading
        return grpc.stream_unary_rpc_method_handler(
            self._guard_unary(handler, reading), response_serializer=handler.response_serializer
        )

    def _refusal(self, method: str, metadata: Mapping[str, str | bytes]) -> _RefusedError | None:
        """Return why a caller may not call a method; None if it may."""
        if self._keys is None:
            return None
        role = role_of(str(metadata.get(AUTHORIZATION, "")), self._keys)
        if role is None:
            variables = " or ".join(each.variable for each in self._keys)
            text = f"{AUTHORIZATION}: must be 'Bearer <key>' of a role; set {variables}"
            return _RefusedError(grpc.StatusCode.UNAUTHENTICATED, text)
        if not method.startswith(_OURS):
            return None
        if method not in METHODS_OF[role]:
            text = f"{AUTHORIZATION}: the key of the role {role} may not call {method}"
            return _RefusedError(grpc.StatusCode.PERMISSION_DENIED, text)
        return None

    def _guard_probe(self, handler: Any) -> Any:
        """Return a handler of health checks that treats every message as empty and reads none."""

        async def answer(_: Any, context: _Context) -> Any:
            try:
                _check_deadline(context.time_remaining(), MAX_PROBE_S)
                return await handler.unary_unary(health_pb2.HealthCheckRequest(), context)
            except _RefusedError as error:
                return await context.abort(error.status, str(error))

        return grpc.stream_unary_rpc_method_handler(
            answer, response_serializer=handler.response_serializer
        )

    def _guard_unary(
        self, handler: Any, reading: asyncio.Semaphore
    ) -> Callable[[Any, _Context], Awaitable[Any]]:
        async def handle(_: Any, context: _Context) -> Any:
            try:
                request = await self._request(handler.request_deserializer, context, reading)
                return await handler.unary_unary(request, context)
            except WireError as error:
                refusal = error.status, str(error), error.trailing_metadata
            # Outside `except` traceback and message are freed; `abort` takes a while.
            return await context.abort(*refusal)

        return handle

    async def _request(
        self, decode: Callable[[bytes], Any], context: _Context, reading: asyncio.Semaphore
    ) -> Any:
        """Read a call's message when a slot for reading is free."""
        _check_deadline(context.time_remaining(), MAX_DEADLINE_S)
        try:
            async with reading, asyncio.timeout(self._read_timeout_s):
                message = await context.read()
        except TimeoutError as error:
            text = f"message: it did not arrive within {self._read_timeout_s:g} s"
            status = grpc.StatusCode.DEADLINE_EXCEEDED
            raise _RefusedError(status, text) from error
        malformed = grpc.StatusCode.INVALID_ARGUMENT
        if message is grpc.aio.EOF:
            raise _RefusedError(malformed, "message: one must be sent")
        try:
            return decode(message)
        except DecodeError as error:
            text = f"message: {len(message)} bytes that are not a message of this method"
            raise _RefusedError(malformed, text) from error


def _check_deadline(remaining_s: float | None, max_s: float) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    if remaining_s is None:
        raise _RefusedError(invalid, "deadline: every call must set a timeout")
    if remaining_s > max_s:
        text = f"deadline: must be at most {max_s:.0f} s away, not {remaining_s:.0f} s"
        raise _RefusedError(invalid, text)


def _refusing(refusal: _RefusedError) -> Callable[[Any, _Context], Awaitable[None]]:
    async def refuse(_: Any, context: _Context) -> None:
        await context.abort(refusal.status, str(refusal))

    return refuse
