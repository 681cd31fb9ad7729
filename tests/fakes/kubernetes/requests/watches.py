"""Watches: what a client sees of the store's changes, as a stream of JSON lines.

A watch begins with the past (everything there, or the history since a version) and goes on with
the present; between the two nothing is lost, because the watch subscribes before it looks back.
Source: https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from tests.fakes.kubernetes.api import Api, present_object
from tests.fakes.kubernetes.errors import ApiError, JsonObject, bad_request
from tests.fakes.kubernetes.objects.selectors import Matcher, label_matcher
from tests.fakes.kubernetes.requests.targets import Target
from tests.fakes.kubernetes.store import Event

_BOOKMARK_PERIOD_S = 60.0
"""How often an idle watch that asked for bookmarks hears of the version."""
INITIAL_EVENTS_END = "k8s.io/initial-events-end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to watch. revision: None begins with everything there. timeout_s: None never ends."""

    target: Target
    matches: Matcher
    revision: int | None
    bookmarks: bool
    initial_events: bool
    timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One line of a watch. kind: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    kind: str
    body: JsonObject


def watch_request(target: Target, query: Mapping[str, str]) -> Request:
    """The watch that a query asks for.

    Raises:
        ApiError: 400 when the version is not a number.
    """
    version = query.get("resourceVersion", "")
    if version and not version.isdigit():
        raise bad_request(f'resourceVersion: Invalid value: "{version}": must be a number')
    initial_events = query.get("sendInitialEvents") == "true"
    return Request(
        target=target,
        matches=label_matcher(query.get("labelSelector", "")),
        revision=int(version) if version not in ("", "0") and not initial_events else None,
        bookmarks=query.get("allowWatchBookmarks") == "true",
        initial_events=initial_events,
        timeout_s=float(query["timeoutSeconds"]) if query.get("timeoutSeconds") else None,
    )


def as_seen(request: Request, event: Event) -> Seen | None:
    """What the watcher sees of a change: leaving the selection looks like a deletion."""
    namespace = event.body["metadata"].get("namespace", "")
    if event.resource != request.target.resource.key:
        return None
    if request.target.namespace not in ("", namespace):
        return None
    before = event.before is not None and request.matches(event.before)
    after = event.kind != "DELETED" and request.matches(event.body)
    if not before and not after:
        return None
    kind = ("MODIFIED" if before else "ADDED") if after else "DELETED"
    return Seen(kind=kind, body=present_object(request.target.resource, event.body))


class Watches:
    """All open watches. Owner: the API server's event loop."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._open: set[asyncio.Queue[Event | None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def close_all(self) -> None:
        for events in self._open:
            events.put_nowait(None)

    async def stream(self, request: Request) -> AsyncIterator[Seen]:
        """The lines of one watch until its time is over or it is closed."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        unsubscribe = self._api.store.subscribe(events.put_nowait)
        self._open.add(events)
        try:
            for seen in self._past(request):
                yield seen
            async for seen in self._present(request, events):
                yield seen
        finally:
            unsubscribe()
            self._open.discard(events)

    def _past(self, request: Request) -> list[Seen]:
        store, target = self._api.store, request.target
        if request.revision is not None:
            try:
                history = store.since(target.resource.key, request.revision)
            except ApiError as expired:
                return [Seen(kind="ERROR", body=expired.status())]
            return [seen for event in history if (seen := as_seen(request, event))]
        present = [
            Seen(kind="ADDED", body=present_object(target.resource, body))
            for body in store.objects(target.resource.key, target.namespace)
            if request.matches(body)
        ]
        if request.initial_events and request.bookmarks:
            present.append(self._bookmark(request, {INITIAL_EVENTS_END: "true"}))
        return present

    async def _present(
        self, request: Request, events: asyncio.Queue[Event | None]
    ) -> AsyncIterator[Seen]:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + request.timeout_s if request.timeout_s else float("inf")
        bookmark_at = loop.time() + _BOOKMARK_PERIOD_S
        while True:
            wake_at = min(ends_at, bookmark_at)
            try:
                async with asyncio.timeout_at(wake_at):
                    event = await events.get()
            except TimeoutError:
                if loop.time() >= ends_at:
                    return
                bookmark_at = loop.time() + _BOOKMARK_PERIOD_S
                if request.bookmarks:
                    yield self._bookmark(request, {})
                continue
            if event is None:
                return
            if seen := as_seen(request, event):
                yield seen

    def _bookmark(self, request: Request, annotations: dict[str, str]) -> Seen:
        resource = request.target.resource
        metadata: JsonObject = {"resourceVersion": str(self._api.store.revision)}
        metadata |= {"annotations": annotations} if annotations else {}
        body = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        return Seen(kind="BOOKMARK", body=body)
