"""Calls to the API server, and the rights to them; only this module uses `kubernetes`.

Objects are plain dicts. The client is synchronous, so calls run in a small pool of threads, each
with its own timeout. A caller that is cancelled does not wait for its call.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import urllib3
from kubernetes import client, config

from vcpo_operator.children.manifest import Kind
from vcpo_operator.names import GROUP, PLURAL
from vcpo_operator.observed.index_view import WATCHED

Document = dict[str, Any]
RequestObserver = Callable[[str, str, int], None]
"""Called after every call: HTTP verb, resource, status code (0: no answer)."""

APPLY_PATCH: Final = "application/apply-patch+yaml"
MERGE_PATCH: Final = "application/merge-patch+json"
_UNREADABLE = ("failed to create typed patch object", "failed to convert new object")
"""How the API server's messages about an unknown field and about a bad quantity begin."""


class ApiError(Exception):
    """The API server refused, or did not answer in time (`status` 0)."""

    def __init__(self, status: int, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status}: {message}" if status else message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        """How long the server asked to be left alone; None when it did not."""

    @property
    def is_gone(self) -> bool:
        return self.status in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}

    @property
    def is_forbidden(self) -> bool:
        return self.status == HTTPStatus.FORBIDDEN

    @property
    def is_invalid(self) -> bool:
        """Whether the object is invalid, so that the same call would fail again.

        A server that cannot read the object to apply answers 500, as for its own faults.
        """
        unreadable = self.status == HTTPStatus.INTERNAL_SERVER_ERROR and self.message.startswith(
            _UNREADABLE
        )
        return (
            self.status in {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY} or unreadable
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """The address of one object, or of a collection when `name` is empty."""

    api_version: str
    plural: str
    namespace: str
    name: str = ""
    subresource: str = ""

    @property
    def path(self) -> str:
        root = "/apis" if "/" in self.api_version else "/api"
        place = ["namespaces", self.namespace] if self.namespace else []
        parts = [root, self.api_version, *place, self.plural, self.name, self.subresource]
        return "/".join(filter(None, parts))

    @property
    def label(self) -> str:
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural


class Cluster:
    """Calls to one API server. Each call raises `ApiError`."""

    def __init__(
        self,
        api_client: client.ApiClient,
        *,
        timeout_s: float = 15.0,
        max_parallel: int = 8,
        on_answer: RequestObserver = lambda verb, resource, code: None,
    ) -> None:
        self._client = api_client
        self._timeout_s = timeout_s
        self._on_answer = on_answer
        self._threads = ThreadPoolExecutor(max_parallel, thread_name_prefix="kubernetes")

    @classmethod
    def from_environment(cls, on_answer: RequestObserver) -> Cluster:
        """Connect with the pod's service account, else with the kubeconfig."""
        settings = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=settings)
        except config.ConfigException:
            _load_kubeconfig(settings)
        return cls(client.ApiClient(settings), on_answer=on_answer)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def get(self, resource: Resource) -> Document | None:
        """Return an object; None when it does not exist."""
        try:
            return await self._call("GET", resource)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def apply(
        self, resource: Resource, body: Mapping[str, Any], *, manager: str, force: bool
    ) -> Document:
        query = {"fieldManager": manager, "force": str(force).lower()}
        return await self._call("PATCH", resource, body, query=query, content_type=APPLY_PATCH)

    async def merge(self, resource: Resource, body: Mapping[str, Any], *, manager: str) -> Document:
        query = {"fieldManager": manager}
        return await self._call("PATCH", resource, body, query=query, content_type=MERGE_PATCH)

    async def create(self, collection: Resource, body: Mapping[str, Any]) -> Document:
        return await self._call("POST", collection, body)

    async def replace(self, resource: Resource, body: Mapping[str, Any]) -> Document:
        return await self._call("PUT", resource, body)

    async def delete(self, resource: Resource, *, uid: str, grace_s: int | None = None) -> None:
        """Delete the object with this uid and what it owns; an object that is gone is no error."""
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
            **({} if grace_s is None else {"gracePeriodSeconds": grace_s}),
        }
        try:
            await self._call("DELETE", resource, body)
        except ApiError as error:
            if not error.is_gone:
                raise

    async def _call(
        self,
        verb: str,
        resource: Resource,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Document:
        loop = asyncio.get_running_loop()
        call = lambda: self._request(verb, resource, body, dict(query or {}), content_type)  # noqa: E731 - bound here for the thread
        code, text, retry_after_s = await loop.run_in_executor(self._threads, call)
        self._on_answer(verb, resource.label, code)
        if code == 0 or code >= HTTPStatus.BAD_REQUEST:
            try:
                message = str(json.loads(text)["message"])
            except (KeyError, TypeError, ValueError):  # not a Status object
                message = text
            raise ApiError(code, message, retry_after_s=retry_after_s)
        document: Document = json.loads(text) if text else {}
        return document

    def _request(
        self,
        verb: str,
        resource: Resource,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str],
        content_type: str,
    ) -> tuple[int, str, float | None]:
        method, url, headers, payload, _ = self._client.param_serialize(
            verb,
            resource.path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=None if body is None else dict(body),
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._client.call_api(
                method, url, headers, payload, _request_timeout=self._timeout_s
            )
            wait = answer.getheader("Retry-After")
            retry_after_s = float(wait) if wait is not None and wait.isdecimal() else None
            return answer.status, answer.read().decode(), retry_after_s
        except client.ApiException as error:
            return int(error.status or 0), str(error.body or error.reason), None
        except urllib3.exceptions.HTTPError as error:
            return 0, f"no answer from the API server: {error}", None


def _load_kubeconfig(settings: client.Configuration) -> None:
    try:
        config.load_kube_config(client_configuration=settings)
    except config.ConfigException as error:
        raise ValueError(
            f"cannot reach the API server: {error} Run in a pod with a service account, or set"
            " KUBECONFIG to a kubeconfig that names a cluster."
        ) from error


_REVIEWS: Final = Resource(
    api_version="authorization.k8s.io/v1", plural="selfsubjectaccessreviews", namespace=""
)


Right = tuple[str, str, str]
"""Group, plural (with a subresource after a slash), and verb."""


def needed_rights(*, namespaced: bool) -> Iterator[Right]:
    """Yield what the operator cannot work without."""
    verbs = {
        (GROUP, PLURAL): "list watch delete",
        (GROUP, f"{PLURAL}/status"): "patch",
        ("", "pods"): "list watch patch delete",
        ("", "secrets"): "get create update",
        ("", "events"): "create",
        **{(kind.group, kind.plural): "get list watch create patch delete" for kind in WATCHED},
        (Kind.CLAIM.group, Kind.CLAIM.plural): "get list watch create patch",
    }
    if not namespaced:
        verbs["apiextensions.k8s.io", "customresourcedefinitions"] = "list watch"
    for (group, resource), names in verbs.items():
        yield from ((group, resource, verb) for verb in names.split())


async def missing_rights(cluster: Cluster, namespaces: Sequence[str]) -> str:
    """Return what the operator's account may not do, in one line with the fix; empty: nothing.

    Without a right to list or watch, kopf would retry for ever in silence.
    namespaces: Those that the operator watches; empty is all.
    """
    rights = list(needed_rights(namespaced=bool(namespaces)))
    wanted = [(right, place) for place in namespaces or [""] for right in rights]
    allowed = await asyncio.gather(*(_is_allowed(cluster, *each) for each in wanted))
    missing: dict[str, list[str]] = defaultdict(list)
    for ((group, resource, verb), place), is_allowed in zip(wanted, allowed, strict=True):
        if not is_allowed:
            where = f" in namespace {place}" if place else ""
            missing[".".join(filter(None, (resource, group))) + where].append(verb)
    if not missing:
        return ""
    listed = "; ".join(f"{'/'.join(verbs)} {what}" for what, verbs in missing.items())
    return f"the operator's account may not {listed}: grant it the roles of the chart (rbac.create)"


async def _is_allowed(cluster: Cluster, right: Right, namespace: str) -> bool:
    group, path, verb = right
    resource, _, subresource = path.partition("/")
    asked = {"group": group, "resource": resource, "subresource": subresource, "verb": verb}
    attributes = {"namespace": namespace, **asked}
    answer = await cluster.create(_REVIEWS, {"spec": {"resourceAttributes": attributes}})
    return bool(answer["status"]["allowed"])
