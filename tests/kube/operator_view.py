"""The operator's view of the cluster: from the fake server's store, or from lists of any server."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from vcpo_operator.watch import index_view as view

from tests.kube.fake_api_server import FakeApiServer
from vcpo_operator.names import RunKey
from vcpo_operator.observed.parse import run_record
from vcpo_operator.observed.records import Observed, RunRecord

_RUN_RESOURCE = ("vcpo.dev", "vcporuns")


class StoreView:
    """The view that kopf's indices give, read from the server's store at this moment."""

    def __init__(self, server: FakeApiServer) -> None:
        self._server = server

    def run(self, key: RunKey) -> RunRecord | None:
        """A run; None when there is none."""
        body = self._server.api.store.get(_RUN_RESOURCE, *key)
        return None if body is None else run_record(copy.deepcopy(body))

    def observed(self, key: RunKey) -> Observed:
        """What belongs to a run."""
        indexed = view.IndexedView()
        indexed.indices = dict(self._indices(key))
        return indexed.observed(key)

    def _indices(self, key: RunKey) -> Iterable[tuple[str, dict[RunKey, list[Any]]]]:
        store = self._server.api.store
        pods = [view.index_pod(body) for body in store.objects(("", view.PODS), key.namespace)]
        yield view.PODS, _joined(pods)
        for kind in view.WATCHED:
            bodies = store.objects((kind.group, kind.plural), key.namespace)
            yield kind.plural, _joined([view.index_child(kind, body) for body in bodies])


class ListedView:
    """The view that kopf's indices give, from the newest lists."""

    def __init__(self) -> None:
        self.listed: Mapping[str, list[dict[str, Any]]] = {}
        """Objects by plural name."""

    def run(self, key: RunKey) -> RunRecord | None:
        """A run; None when there is none."""
        return self._indexed().run(key)

    def observed(self, key: RunKey) -> Observed:
        """What belongs to a run."""
        return self._indexed().observed(key)

    def _indexed(self) -> view.IndexedView:
        indexed, listed = view.IndexedView(), self.listed
        indexed.indices = {
            view.RUNS: _joined(map(view.index_run, listed.get(view.RUNS, ()))),
            view.PODS: _joined(map(view.index_pod, listed.get(view.PODS, ()))),
            **{
                kind.plural: _joined(view.index_child(kind, body) for body in listed[kind.plural])
                for kind in view.WATCHED
                if kind.plural in listed
            },
        }
        return indexed


def _joined(entries: Iterable[dict[RunKey, Any]]) -> dict[RunKey, list[Any]]:
    index: dict[RunKey, list[Any]] = {}
    for entry in entries:
        for key, record in entry.items():
            index.setdefault(key, []).append(record)
    return index
