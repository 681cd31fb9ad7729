"""The HTTP side of the fake API server: requests into verbs, results into answers."""

import contextlib
import json
import logging
from typing import Any

from aiohttp import web

from tests.fakes.kubernetes.access import REVIEWS, User, authorize, review, user_of
from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.errors import ApiError, unsupported_media_type
from tests.fakes.kubernetes.faults import Faults, broken
from tests.fakes.kubernetes.patching.apply import APPLY, PATCH_TYPES
from tests.fakes.kubernetes.recorder import Recorder, make_record
from tests.fakes.kubernetes.requests import actions, discovery
from tests.fakes.kubernetes.requests.exchange import (
    fail_after,
    fail_before,
    parse_body,
    refusal_response,
)
from tests.fakes.kubernetes.requests.targets import Target, delete_options, target_of, write_options
from tests.fakes.kubernetes.requests.watches import Seen, Watches, watch_request

_log = logging.getLogger(__name__)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}
_HEALTH = ("healthz", "livez", "readyz")


class Frontend:
    """Answers HTTP requests. tokens: holders of the bearer tokens that are accepted."""

    def __init__(
        self,
        api: Api,
        watches: Watches,
        recorder: Recorder,
        faults: Faults,
        *,
        tokens: dict[str, User],
    ) -> None:
        self._api = api
        self._watches = watches
        self._recorder = recorder
        self._faults = faults
        self._tokens = tokens

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request; a failure is answered with a Status object."""
        try:
            return await self._answer(request)
        except ApiError as refusal:
            return refusal_response(refusal)
        except Exception:  # noqa: BLE001 - see below
            # A bug of the fake must be an answer, or a client retries for ever in silence.
            _log.exception("%s %s", request.method, request.path_qs)
            return refusal_response(broken())

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        user = user_of(request.headers, self._tokens)
        if request.path.strip("/").partition("/")[0] in _HEALTH:
            return web.Response(text="ok")
        body = parse_body(await request.read(), request.headers.get("Content-Type", ""))
        if request.path == REVIEWS:
            return web.json_response(review(self._api.store, user, body), status=201)
        try:
            target = target_of(self._api.catalogue, request.path)
        except ApiError:
            return web.json_response(discovery.document(self._api.catalogue, request.path))
        verb = _verb(request, target)
        record = make_record(
            verb, target, user=user.name, headers=request.headers, query=request.query, body=body
        )
        self._recorder.add(record)
        fault = self._faults.on(record)
        await fail_before(fault, request)
        authorize(self._api.store, user, verb, target)
        response = await self._perform(verb, target, request, body)
        fail_after(fault, request)
        return response

    async def _perform(
        self, verb: str, target: Target, request: web.BaseRequest, body: Any
    ) -> web.StreamResponse:
        match verb:
            case "watch":
                return await self._watch(target, request)
            case "list":
                return self._list(target, request)
            case "delete":
                return self._delete(target, request, body)
            case "get":
                return web.json_response(self._api.get(target))
        return self._write(verb, target, request, body)

    def _write(
        self, verb: str, target: Target, request: web.BaseRequest, body: Any
    ) -> web.StreamResponse:
        # Only an apply must name its manager itself.
        applying = request.content_type == APPLY
        program = "" if applying else request.headers.get("User-Agent", "").partition("/")[0]
        options = write_options(request.query, program)
        code = 200
        if verb == "create" and target.subresource:
            return web.json_response(actions.act(self._api, target, body), status=201)
        if verb == "create":
            result, code = self._api.create(target, body), 201
        elif verb == "update":
            result = self._api.update(target, body)
        else:
            if request.content_type not in PATCH_TYPES:
                raise unsupported_media_type(request.content_type, PATCH_TYPES)
            result, new = self._api.patch(target, request.content_type, body, options)
            code = 201 if new else 200
        return web.json_response(result, status=code)

    def _delete(self, target: Target, request: web.BaseRequest, body: Any) -> web.Response:
        options = delete_options(request.query, body or {})
        left = self._api.delete(target, options)
        if left["metadata"].get("deletionTimestamp") or target.resource.kind == "Pod":
            return web.json_response(left)
        resource = target.resource
        details = {
            "name": target.name,
            "group": resource.group,
            "kind": resource.plural,
            "uid": left["metadata"]["uid"],
        }
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return web.json_response({**status, "details": details})

    def _list(self, target: Target, request: web.BaseRequest) -> web.Response:
        found = self._api.list(target, request.query.get("labelSelector", ""))
        return web.json_response(
            {
                "kind": f"{target.resource.kind}List",
                "apiVersion": target.resource.api_version,
                "metadata": {"resourceVersion": str(self._api.store.revision)},
                "items": found,
            }
        )

    async def _watch(self, target: Target, request: web.BaseRequest) -> web.StreamResponse:
        wanted = watch_request(target, request.query)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        # Who has seen enough just goes away.
        with contextlib.suppress(ConnectionResetError):
            async for seen in self._watches.stream(wanted):
                await response.write(_line(seen))
            await response.write_eof()
        return response


def _line(seen: Seen) -> bytes:
    return json.dumps({"type": seen.kind, "object": seen.body}).encode() + b"\n"


def _verb(request: web.BaseRequest, target: Target) -> str:
    query = request.query
    if request.method == "DELETE" and target.name:
        return "delete"
    if request.method in _VERBS:
        return _VERBS[request.method]
    if query.get("watch") in ("true", "1"):
        return "watch"
    if request.method != "GET":
        raise ApiError(405, "MethodNotAllowed", f"{request.method} is not supported")
    return "get" if target.name else "list"
