"""The client side of the wire: channels with the shared token, and classes of errors."""

from __future__ import annotations

from typing import Any

import grpc

from vcpo.wire.guard import TOKEN_KEY
from vcpo.wire.limits import CHANNEL_OPTIONS


def open_channel(address: str, *, token: str | None) -> grpc.aio.Channel:
    """Open a channel to `host:port`; its calls carry the token, if there is one.

    The channel connects at the first call. Every call needs a timeout of its own.
    """
    interceptors: list[grpc.aio.ClientInterceptor] = []
    if token:
        interceptors = [_UnaryToken(token), _StreamToken(token)]
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=interceptors)


_TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
    }
)
_DOUBTFUL = frozenset(
    {
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DATA_LOSS,
    }
)


def is_transient(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the server is unreachable, busy or slow, so that a later call may succeed."""
    return error.code() in _TRANSIENT


def is_doubtful(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a connection, a proxy or a bug of the server may have caused the error.

    Repeat such a call a few times only. An error that is neither transient nor doubtful is final:
    the request must change.
    """
    return error.code() in _DOUBTFUL


class _Token:
    def __init__(self, token: str) -> None:
        self._header = (TOKEN_KEY, f"Bearer {token}")

    def _with_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._header)
        return grpc.aio.ClientCallDetails(
            method=details.method,
            timeout=details.timeout,
            metadata=metadata,
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
        )


class _UnaryToken(_Token, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._with_token(client_call_details), request)


class _StreamToken(_Token, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._with_token(client_call_details), request)
