"""Counts and times the calls that a server answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from prometheus_client import Counter, Histogram

from vcpo.wire.v1 import control_pb2, policy_pb2, work_pb2

OTHER_METHOD: Final = "other"
"""The name of every method that is not of this project."""

_FILES = (work_pb2, policy_pb2, control_pb2)
_NAMES: Final = {
    f"/{service.full_name}/{method.name}": method.name
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Names of methods by their path; no two services have methods of the same name."""

METHODS: Final = (*_NAMES.values(), OTHER_METHOD)

_Context = grpc.aio.ServicerContext[Any, Any]
_Handle = Callable[[Any, _Context], Awaitable[Any]]


class CallMeter(grpc.aio.ServerInterceptor):
    """Interceptor that counts calls by method and status code, and observes how long they took.

    It stands before the guard, so it sees what that refuses. Health checks and reflection are not
    metered.

    requests: with the labels `method` and `code`.
    duration_s: with the label `method`.
    """

    def __init__(self, requests: Counter, duration_s: Histogram) -> None:
        self._requests = requests
        self._duration_s = duration_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler within the measurement."""
        handler = await continuation(handler_call_details)
        method = _NAMES.get(str(handler_call_details.method), OTHER_METHOD)
        if handler is None:
            self._requests.labels(method, grpc.StatusCode.UNIMPLEMENTED.name).inc()
            return None
        if method is OTHER_METHOD:
            return handler
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._meter(handler.stream_stream, method),
                response_serializer=handler.response_serializer,
            )
        return grpc.stream_unary_rpc_method_handler(
            self._meter(handler.stream_unary, method),
            response_serializer=handler.response_serializer,
        )

    def _meter(self, handle: _Handle, method: str) -> _Handle:
        async def measure(requests: Any, context: _Context) -> Any:
            started_s = time.monotonic()
            code = grpc.StatusCode.OK
            try:
                return await handle(requests, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except grpc.aio.AbortError:
                code = context.code()
                raise
            except Exception:  # a bug: gRPC logs it and answers with this code
                code = grpc.StatusCode.UNKNOWN
                raise
            finally:
                self._requests.labels(method, code.name).inc()
                self._duration_s.labels(method).observe(time.monotonic() - started_s)

        return measure
