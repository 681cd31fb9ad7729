"""The HTTP side of the fake API server: requests into verbs, results into answers."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
from collections.abc import Mapping
from typing import Any

import yaml
from aiohttp import web

from tests.kube import actions, discovery
from tests.kube.access import User, authorize, user_of
from tests.kube.api import APPLY, PATCH_TYPES, Api
from tests.kube.errors import (
    ApiError,
    JsonObject,
    bad_request,
    expired,
    unsupported_media_type,
)
from tests.kube.faults import Effect, Fault, Faults, broken
from tests.kube.recorder import Recorder, recorded
from tests.kube.representations import Form, form_of, metadata_only, object_list, shown, table
from tests.kube.targets import (
    Target,
    delete_options,
    target_of,
    write_options,
)
from tests.kube.watches import Seen, Watches, watch_request

_log = logging.getLogger(__name__)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}
_HEALTH = ("healthz", "livez", "readyz")
_BODY_TYPES = ("application/json", "application/yaml")


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

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer any request; a failure is answered with a Status object."""
        try:
            return await self._answer(request)
        except ApiError as refusal:
            return _refused(refusal)
        except Exception:  # noqa: BLE001 - see below
            # A bug of the fake must be an answer, or a client retries for ever in silence.
            _log.exception("%s %s", request.method, request.path_qs)
            return _refused(broken())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        user = user_of(request.headers, self._tokens)
        if request.path.strip("/").partition("/")[0] in _HEALTH:
            return web.Response(text="ok")
        body = _parsed(await request.read(), request.content_type)
        if review := actions.review(self._api, user, request.path, body):
            return web.json_response(review, status=201)
        try:
            target = target_of(self._api.catalogue, request.path)
        except ApiError:
            accept = request.headers.get("Accept", "")
            found = discovery.document(self._api.catalogue, request.path, accept)
            headers = {"Content-Type": discovery.content_type(found)}
            return web.Response(text=json.dumps(found), headers=headers)
        verb = _verb(request, target)
        record = recorded(
            verb,
            target,
            user=user.name,
            headers=request.headers,
            query=request.query,
            body=body,
        )
        self._recorder.add(record)
        fault = self._faults.on(record)
        await _before(fault, request)
        authorize(self._api.store, user, verb, target)
        response = await self._perform(verb, target, request, body)
        if fault is not None and fault.effect is Effect.LOSE_REPLY:
            _hang_up(request)
        return response

    async def _perform(
        self, verb: str, target: Target, request: web.Request, body: Any
    ) -> web.StreamResponse:
        match verb:
            case "watch":
                return await self._watch(target, request)
            case "list":
                return self._list(target, request)
            case "deletecollection":
                return self._delete_collection(target, request, body)
            case "delete":
                return self._delete(target, request, body)
            case "get":
                return self._show(target, request, self._api.get(target), 200)
        return self._write(verb, target, request, body)

    def _write(
        self, verb: str, target: Target, request: web.Request, body: Any
    ) -> web.StreamResponse:
        # Only an apply must name its manager itself.
        applying = request.content_type == APPLY
        program = "" if applying else request.headers.get("User-Agent", "").partition("/")[0]
        options = write_options(request.query, program)
        code = 200
        if verb == "create" and target.subresource:
            return web.json_response(actions.act(self._api, target, body, self._tokens), status=201)
        if verb == "create":
            result, code = self._api.create(target, body, options), 201
        elif verb == "update":
            result = self._api.update(target, body, options)
        else:
            if request.content_type not in PATCH_TYPES:
                raise unsupported_media_type(request.content_type, PATCH_TYPES)
            result, new = self._api.patch(target, request.content_type, body, options)
            code = 201 if new else 200
        response = self._show(target, request, result, code)
        for warning in options.warnings:
            response.headers.add("Warning", f'299 - "{warning}"')
        return response

    def _delete(self, target: Target, request: web.Request, body: Any) -> web.Response:
        options = delete_options(request.query, body or {})
        left = self._api.delete(target, options)
        if left["metadata"].get("deletionTimestamp") or target.resource.kind == "Pod":
            return self._show(target, request, left, 200)
        resource = target.resource
        details = {
            "name": target.name,
            "group": resource.group,
            "kind": resource.plural,
            "uid": left["metadata"]["uid"],
        }
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return web.json_response({**status, "details": details})

    def _delete_collection(self, target: Target, request: web.Request, body: Any) -> web.Response:
        options = delete_options(request.query, body or {})
        query = request.query
        doomed = self._api.list(
            target, query.get("labelSelector", ""), query.get("fieldSelector", "")
        )
        for found in doomed:
            metadata = found["metadata"]
            one = Target(
                resource=target.resource,
                namespace=metadata.get("namespace", ""),
                name=metadata["name"],
            )
            self._api.delete(one, options)
        metadata = {"resourceVersion": str(self._api.store.revision)}
        return web.json_response(object_list(target.resource, doomed, metadata, Form.FULL))

    def _list(self, target: Target, request: web.Request) -> web.Response:
        query, store = request.query, self._api.store
        found = self._api.list(
            target, query.get("labelSelector", ""), query.get("fieldSelector", "")
        )
        metadata: JsonObject = {"resourceVersion": str(store.revision)}
        page, after = _page(found, query, store.oldest_revision)
        if after is not None:
            metadata |= {"continue": _token(after, store.revision), "remainingItemCount": 0}
            metadata["remainingItemCount"] = len(found) - found.index(page[-1]) - 1
        form = form_of(request.headers.get("Accept", ""))
        if form is Form.TABLE:
            return web.json_response(table(target.resource, page, metadata, self._api.clock()))
        return web.json_response(object_list(target.resource, page, metadata, form))

    def _show(
        self, target: Target, request: web.Request, body: JsonObject, code: int
    ) -> web.Response:
        form = form_of(request.headers.get("Accept", ""))
        return web.json_response(shown(target.resource, body, form, self._api.clock()), status=code)

    async def _watch(self, target: Target, request: web.Request) -> web.StreamResponse:
        wanted = watch_request(target, request.query)
        form = form_of(request.headers.get("Accept", ""))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        async for seen in self._watches.stream(wanted):
            await response.write(self._line(target, seen, form))
        await response.write_eof()
        return response

    def _line(self, target: Target, seen: Seen, form: Form) -> bytes:
        body = seen.body
        if seen.kind == "BOOKMARK" and form is not Form.FULL:
            body = metadata_only(body)
        elif seen.kind not in ("ERROR", "BOOKMARK"):
            body = shown(target.resource, body, form, self._api.clock())
        return json.dumps({"type": seen.kind, "object": body}).encode() + b"\n"


def _verb(request: web.Request, target: Target) -> str:
    query = request.query
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    if request.method in _VERBS:
        return _VERBS[request.method]
    if query.get("watch") in ("true", "1"):
        return "watch"
    if request.method != "GET":
        raise ApiError(405, "MethodNotAllowed", f"{request.method} is not supported")
    return "get" if target.name else "list"


def _parsed(raw: bytes, content_type: str) -> Any:
    """A request's body: JSON, or YAML where a client may send it."""
    if not raw:
        return None
    if "yaml" in content_type:
        return _from_yaml(raw)
    if not content_type.endswith("json"):
        raise unsupported_media_type(content_type, _BODY_TYPES)
    try:
        return json.loads(raw)
    except json.JSONDecodeError as mistake:
        raise bad_request(f"the body is not JSON: {mistake}") from mistake


def _from_yaml(raw: bytes) -> Any:
    """YAML, of which JSON is a part; but to PyYAML the JSON number `1e-8` is a text."""
    try:
        return json.loads(raw)
    except json.JSONDecodeError:
        return yaml.safe_load(raw)


def _refused(refusal: ApiError) -> web.Response:
    headers = {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    return web.json_response(refusal.status(), status=refusal.code, headers=headers)


async def _before(fault: Fault | None, request: web.Request) -> None:
    """What a fault does before anything is done."""
    if fault is None:
        return
    if fault.effect is Effect.REJECT:
        raise fault.error or broken()
    if fault.effect is Effect.HANG:
        await fault.released.wait()
    if fault.effect in (Effect.DROP, Effect.HANG):
        _hang_up(request)


def _hang_up(request: web.Request) -> None:
    """End the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError


def _page(
    found: list[JsonObject], query: Mapping[str, str], oldest_revision: int
) -> tuple[list[JsonObject], tuple[str, str] | None]:
    """One page of a list, and the last key on it when more follow.

    Departure: later pages show the present, not the moment of the first page.
    """
    if query.get("continue"):
        revision, start = _position(query["continue"])
        if revision < oldest_revision:
            raise expired("The provided continue parameter is too old.")
        found = [body for body in found if _key(body) > start]
    limit = int(query.get("limit") or 0)
    if not limit or len(found) <= limit:
        return found, None
    return found[:limit], _key(found[limit - 1])


def _key(body: JsonObject) -> tuple[str, str]:
    return body["metadata"].get("namespace", ""), body["metadata"]["name"]


def _token(after: tuple[str, str], revision: int) -> str:
    return base64.urlsafe_b64encode(json.dumps([revision, *after]).encode()).decode()


def _position(token: str) -> tuple[int, tuple[str, str]]:
    try:
        revision, namespace, name = json.loads(base64.urlsafe_b64decode(token))
    except (ValueError, binascii.Error) as mistake:
        raise bad_request(f"continue key is not valid: {mistake}") from mistake
    return revision, (namespace, name)
