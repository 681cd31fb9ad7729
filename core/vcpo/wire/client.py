"""The client side of the wire: channels that show a caller's keys, and classes of errors."""

import os
from collections.abc import Sequence
from typing import Any

import grpc

from vcpo.wire.access.roles import authorization
from vcpo.wire.access.tls import Trust
from vcpo.wire.limits import CHANNEL_OPTIONS


def open_channel(address: str, *, key: str | None, trust: Trust | None = None) -> grpc.aio.Channel:
    """Open a channel to `host:port`, which connects at the first call.

    Every call needs a timeout of its own.

    key: key of the caller's role at that server, shown with every call; None or empty shows none.
    trust: whom the caller trusts; None calls in plain text.
    """
    shown = [authorization(key)] if key else []
    interceptors: list[grpc.aio.ClientInterceptor] = []
    if shown:
        interceptors = [_UnaryKeys(shown), _StreamKeys(shown)]
    options = (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(_has_proxy(address))))
    if trust is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    named = () if trust.server_name is None else ((_SERVER_NAME, trust.server_name),)
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(root_certificates=trust.authority),
        options=(*options, *named),
        interceptors=interceptors,
    )


def _has_proxy(address: str) -> bool:
    """Whether a proxy for gRPC alone is set; those of the hub are not for the learner."""
    is_here = address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
    return not is_here and "grpc_proxy" in os.environ


_SERVER_NAME = "grpc.ssl_target_name_override"


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


class _Keys:
    def __init__(self, shown: Sequence[tuple[str, str]]) -> None:
        self._shown = tuple(shown)

    def _with_keys(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._shown)
        return grpc.aio.ClientCallDetails(
            method=details.method,
            timeout=details.timeout,
            metadata=metadata,
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
        )


class _UnaryKeys(_Keys, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._with_keys(client_call_details), request)


class _StreamKeys(_Keys, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._with_keys(client_call_details), request)
