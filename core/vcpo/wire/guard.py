"""The guard before every method: who may call, for how long, with how many bytes.

It looks at a call before its message is read. gRPC takes in a message only when it is asked for, up
to a window of some 64 KiB, so a stranger's stays outside. To gRPC each method is therefore one with
a stream of requests, of which the guard reads the one there is; on the wire that is the same.

```
token ---> deadline ---> room to read ---> message ---> method ---> responses, read in time
```

Health checks stay open for probes. All services of a server are as healthy as each other, so a
probe is answered without a look at its message. Reflection wants the token like everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from vcpo.wire.errors import WireError
from vcpo.wire.limits import (
    MAX_CONTROL_MESSAGES_READ,
    MAX_DEADLINE_S,
    MAX_MESSAGES_READ,
    MAX_STREAMS,
    READ_TIMEOUT_S,
    STALLED_READER_S,
)
from vcpo.wire.v1 import control_pb2

TOKEN_KEY = "authorization"  # noqa: S105 - the metadata key, not a secret

_Context = grpc.aio.ServicerContext[Any, Any]
_PROBE = f"/{health.SERVICE_NAME}/Check"
_CONTROL = f"/{control_pb2.DESCRIPTOR.services_by_name['ControlService'].full_name}/"


class CallRefusal(StrEnum):
    """Why a call was refused, or a stream ended before its end."""

    TOKEN = "token"  # noqa: S105 - a reason
    DEADLINE = "deadline"
    MESSAGE = "message"
    STREAMS = "streams"
    STALLED = "stalled"


class _RefusedError(WireError):
    """A call that the guard does not let pass."""

    def __init__(self, reason: CallRefusal, status: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.status = status


class Guard(grpc.aio.ServerInterceptor):
    """Lets calls pass that have the token and a deadline, and maps errors to statuses.

    token: None lets anybody pass.
    read_timeout_s: Time for a message to arrive.
    stalled_reader_s: Time for a caller to take one response of a stream.
    """

    def __init__(
        self,
        token: str | None,
        *,
        read_timeout_s: float = READ_TIMEOUT_S,
        stalled_reader_s: float = STALLED_READER_S,
    ) -> None:
        self.refusals: Counter[CallRefusal] = Counter()
        """Calls refused so far."""
        self._expected = f"Bearer {token}" if token else None
        self._read_timeout_s = read_timeout_s
        self._stalled_reader_s = stalled_reader_s
        self._reading = asyncio.Semaphore(MAX_MESSAGES_READ)
        self._reading_control = asyncio.Semaphore(MAX_CONTROL_MESSAGES_READ)
        self._num_streams = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Put the guard before a method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if method == _PROBE:
            return _probe(handler)
        if not self._knows(handler_call_details.invocation_metadata):
            self.refusals[CallRefusal.TOKEN] += 1
            return grpc.stream_stream_rpc_method_handler(_turn_away)
        if not method.startswith("/vcpo."):  # reflection, and what else the libraries serve
            return handler
        reading = self._reading_control if method.startswith(_CONTROL) else self._reading
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._guard_stream(handler, reading),
                response_serializer=handler.response_serializer,
            )
        return grpc.stream_unary_rpc_method_handler(
            self._guard_unary(handler, reading), response_serializer=handler.response_serializer
        )

    def _knows(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        if self._expected is None:
            return True
        received = str(dict(metadata or ()).get(TOKEN_KEY, ""))
        return hmac.compare_digest(received.encode(), self._expected.encode())

    def _guard_unary(
        self, handler: Any, reading: asyncio.Semaphore
    ) -> Callable[[Any, _Context], Awaitable[Any]]:
        async def guarded(_: Any, context: _Context) -> Any:
            try:
                return await handler.unary_unary(
                    await self._request(handler.request_deserializer, context, reading), context
                )
            except WireError as error:
                refusal = error.status, str(error)
            # The error is gone here, and with its traceback the message: to abort takes a while.
            return await context.abort(*refusal)

        return guarded

    def _guard_stream(
        self, handler: Any, reading: asyncio.Semaphore
    ) -> Callable[[Any, _Context], Awaitable[None]]:
        async def guarded(_: Any, context: _Context) -> None:
            self._num_streams += 1
            try:
                refusal = await self._stream(handler, context, reading)
                if refusal is not None:
                    # Behind a chunk that nobody takes this waits until the call's deadline; gRPC
                    # keeps the chunk for so long, and the stream its place.
                    await context.abort(*refusal)
            finally:
                self._num_streams -= 1

        return guarded

    async def _stream(
        self, handler: Any, context: _Context, reading: asyncio.Semaphore
    ) -> tuple[grpc.StatusCode, str] | None:
        """Send a stream; returns why it ended before its end."""
        if self._num_streams > MAX_STREAMS:
            self.refusals[CallRefusal.STREAMS] += 1
            text = f"streams: {MAX_STREAMS} are open already; ask again later"
            return grpc.StatusCode.RESOURCE_EXHAUSTED, text
        try:
            request = await self._request(handler.request_deserializer, context, reading)
            async with contextlib.aclosing(handler.unary_stream(request, context)) as responses:
                async for response in responses:
                    async with asyncio.timeout(self._stalled_reader_s):
                        await context.write(response)
        except WireError as error:
            return error.status, str(error)
        except TimeoutError:
            self.refusals[CallRefusal.STALLED] += 1
            text = f"stream: nothing of it was read for {self._stalled_reader_s:g} s"
            return grpc.StatusCode.DEADLINE_EXCEEDED, text
        except grpc.aio.InternalError:
            if not context.cancelled():  # whoever hangs up in the middle of a chunk is no fault
                raise
        return None

    async def _request(
        self, decode: Callable[[bytes], Any], context: _Context, reading: asyncio.Semaphore
    ) -> Any:
        """Read a call's message once there is room for it."""
        try:
            _check_deadline(context.time_remaining())
            return await self._message(decode, context, reading)
        except _RefusedError as error:
            self.refusals[error.reason] += 1
            raise

    async def _message(
        self, decode: Callable[[bytes], Any], context: _Context, reading: asyncio.Semaphore
    ) -> Any:
        try:
            async with reading, asyncio.timeout(self._read_timeout_s):
                message = await context.read()
        except TimeoutError as error:
            text = f"message: it did not arrive within {self._read_timeout_s:g} s"
            status = grpc.StatusCode.DEADLINE_EXCEEDED
            raise _RefusedError(CallRefusal.MESSAGE, status, text) from error
        malformed = CallRefusal.MESSAGE, grpc.StatusCode.INVALID_ARGUMENT
        if message is grpc.aio.EOF:
            raise _RefusedError(*malformed, "message: one must be sent")
        try:
            return decode(message)
        except DecodeError as error:
            text = f"message: these {len(message)} bytes are none of this method's"
            raise _RefusedError(*malformed, text) from error


def _check_deadline(remaining_s: float | None) -> None:
    invalid = CallRefusal.DEADLINE, grpc.StatusCode.INVALID_ARGUMENT
    if remaining_s is None:
        raise _RefusedError(*invalid, "deadline: every call must set a timeout")
    if remaining_s > MAX_DEADLINE_S:
        text = f"deadline: must be at most {MAX_DEADLINE_S:.0f} s away, not {remaining_s:.0f} s"
        raise _RefusedError(*invalid, text)


async def _turn_away(_: Any, context: _Context) -> None:
    text = f"{TOKEN_KEY}: must be 'Bearer <token of the run>'; set VCPO_TOKEN"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)


def _probe(handler: Any) -> Any:
    """The method of health checks, which takes every message for an empty one and reads none."""

    async def answer(_: Any, context: _Context) -> Any:
        return await handler.unary_unary(health_pb2.HealthCheckRequest(), context)

    return grpc.stream_unary_rpc_method_handler(
        answer, response_serializer=handler.response_serializer
    )
