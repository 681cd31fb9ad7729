"""The view of the cluster: the records in kopf's indices, put together by run.

kopf fills every index before it calls any handler. So no run is reconciled while some of its
children are not observed yet. The indices hold records, not whole objects.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from vcpo_operator.children.manifest import Kind
from vcpo_operator.names import RUN_LABEL, RunKey
from vcpo_operator.observed.parse import (
    collect_observed,
    parse_child,
    parse_claim,
    parse_config,
    parse_group,
    parse_learner,
    parse_pod,
    parse_run_record,
)
from vcpo_operator.observed.records import ObservedState, RunRecord

Body = Mapping[str, Any]
Index = Mapping[Any, Iterable[Any]]

RUNS: Final = "vcporuns"
PODS: Final = "pods"
WATCHED: Final = (
    Kind.CONFIG_MAP,
    Kind.STATEFUL_SET,
    Kind.DEPLOYMENT,
    Kind.SERVICE,
    Kind.SERVICE_ACCOUNT,
    Kind.CLAIM,
    Kind.BUDGET,
    Kind.NETWORK_POLICY,
)

INDICES: Final = (RUNS, PODS, *(kind.plural for kind in WATCHED))

_SPECIAL: Final[Mapping[Kind, Callable[[Body], Any]]] = {
    Kind.STATEFUL_SET: parse_learner,
    Kind.DEPLOYMENT: parse_group,
    Kind.CLAIM: parse_claim,
    Kind.CONFIG_MAP: parse_config,
}


def child_record(kind: Kind, body: Body) -> Any:
    """Return the record that the index of a kind holds of an object."""
    special = _SPECIAL.get(kind)
    return parse_child(kind, body) if special is None else special(body)


def run_key(body: Body) -> RunKey | None:
    """Return the run that a child or pod belongs to; None when it belongs to none."""
    metadata = body["metadata"]
    name = (metadata.get("labels") or {}).get(RUN_LABEL)
    return None if name is None else RunKey(metadata["namespace"], name)


def index_run(body: Body) -> dict[RunKey, RunRecord]:
    """Return the entry of the index of runs."""
    record = parse_run_record(body)
    return {record.key: record}


def index_child(kind: Kind, body: Body) -> dict[RunKey, Any]:
    """Return the entry of the index of a kind; empty for objects that belong to no run."""
    key = run_key(body)
    return {} if key is None else {key: child_record(kind, body)}


def index_pod(body: Body) -> dict[RunKey, Any]:
    """Return the entry of the index of pods; empty for pods of no run or of an unknown role."""
    key, pod = run_key(body), parse_pod(body)
    return {} if key is None or pod is None else {key: pod}


class IndexedView:
    """Reads runs and their objects from indices by name; see `reconcile.observer.View`."""

    def __init__(self) -> None:
        self.indices: Mapping[str, Index] = {}
        """Indices by name; the operator sets them once, when it starts."""

    def run(self, key: RunKey) -> RunRecord | None:
        return next(iter(self._of(RUNS, key)), None)

    def observed_state(self, key: RunKey) -> ObservedState:
        others = [
            child
            for kind in WATCHED
            if kind not in _SPECIAL
            for child in self._of(kind.plural, key)
        ]
        return collect_observed(
            learners=self._of(Kind.STATEFUL_SET.plural, key),
            groups=self._of(Kind.DEPLOYMENT.plural, key),
            claims=self._of(Kind.CLAIM.plural, key),
            configs=self._of(Kind.CONFIG_MAP.plural, key),
            pods=self._of(PODS, key),
            others=others,
        )

    def _of(self, index: str, key: RunKey) -> Iterable[Any]:
        return self.indices.get(index, {}).get(key, ())
