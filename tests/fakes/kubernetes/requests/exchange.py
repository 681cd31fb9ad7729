"""The edges of an HTTP exchange: read a body, refuse a request, fail on purpose."""

import asyncio
import json
from typing import Any

import yaml
from aiohttp import web

from tests.fakes.kubernetes.errors import ApiError, bad_request, unsupported_media_type
from tests.fakes.kubernetes.faults import Effect, Fault, broken

_BODY_TYPES = ("application/json", "application/yaml")


def parse_body(raw: bytes, content_type: str) -> Any:
    """A request's body: JSON, or YAML where a client may send it; without a type it is JSON.

    Raises:
        ApiError: 400 when it cannot be read, 415 when it is in another format.
    """
    if not raw:
        return None
    if "yaml" in content_type:
        return _from_yaml(raw)
    if content_type and not content_type.partition(";")[0].endswith("json"):
        raise unsupported_media_type(content_type, _BODY_TYPES)
    try:
        return json.loads(raw)
    except json.JSONDecodeError as mistake:
        raise bad_request(f"the body is not JSON: {mistake}") from mistake


def _from_yaml(raw: bytes) -> Any:
    """YAML, of which JSON is a part; but PyYAML takes JSON's number `1e-8` for a text."""
    try:
        return json.loads(raw)
    except json.JSONDecodeError:
        return yaml.safe_load(raw)


def refusal_response(refusal: ApiError) -> web.Response:
    """The answer to a request that failed."""
    headers = {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    return web.json_response(refusal.status(), status=refusal.code, headers=headers)


async def fail_before(fault: Fault | None, request: web.BaseRequest) -> None:
    """Carry out a fault that lets nothing be done.

    Raises:
        ApiError: the fault's answer.
    """
    if fault is None:
        return
    if fault.effect is Effect.REJECT:
        raise fault.error or broken()
    if fault.effect is Effect.HANG:
        await fault.released.wait()
    if fault.effect in (Effect.DROP, Effect.HANG):
        disconnect(request)


def fail_after(fault: Fault | None, request: web.BaseRequest) -> None:
    """Carry out a fault that loses the answer to what has been done."""
    if fault is not None and fault.effect is Effect.LOSE_REPLY:
        disconnect(request)


def disconnect(request: web.BaseRequest) -> None:
    """End the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError
