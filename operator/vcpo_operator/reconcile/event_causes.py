"""Reading the events about stalled objects (docs/design/015-ends-of-a-run.md)."""

from __future__ import annotations

import logging

from vcpo_operator.cluster_api.client import ApiError
from vcpo_operator.cluster_api.executor import Executor
from vcpo_operator.decisions.stalled import (
    PATIENCE_S,
    REREAD_S,
    stalled_uids,
    with_event_causes,
)
from vcpo_operator.decisions.status_model import RunStatus
from vcpo_operator.names import RunKey
from vcpo_operator.observed.pod_causes import EVENT_REASONS, cause_from_events
from vcpo_operator.observed.records import ObservedState
from vcpo_operator.reconcile.memory import RunMemory

_LOGGER = logging.getLogger(__name__)


async def read_event_causes(
    observed: ObservedState,
    key: RunKey,
    memory: RunMemory,
    executor: Executor,
    *,
    before: RunStatus,
    now_s: float,
) -> ObservedState:
    """Return the observed state with causes from events, for objects that are stalled.

    before: The status as the last reconcile left it, maybe that of another operator. A cause in it
        is read again at once: without it the conditions would say less than before for a while.
    now_s: Unix time.
    An error of the API server is logged; the causes then stay as they were.
    """
    uids, known = stalled_uids(observed), memory.event_causes
    memory.event_causes = {uid: known[uid] for uid in uids if uid in known}
    if _is_read_due(memory, uids, now_s, is_told=_tells_of_events(before)):
        memory.events_read_s = now_s
        for uid in uids:
            try:
                cause = cause_from_events(await executor.read_events(key, uid))
            except ApiError as error:
                _LOGGER.info("%s: cannot read events: %s", key, error)
                break
            if cause is None:
                memory.event_causes.pop(uid, None)
            else:
                memory.event_causes[uid] = cause
    return with_event_causes(observed, memory.event_causes)


def _tells_of_events(status: RunStatus) -> bool:
    """Whether a status has a cause that only events tell."""
    parts = (status.condition(kind) for kind in ("LearnerReady", "RolloutsReady"))
    return any(part is not None and part.reason in EVENT_REASONS for part in parts)


def _is_read_due(memory: RunMemory, uids: tuple[str, ...], now_s: float, *, is_told: bool) -> bool:
    """Whether events are read now; records since when an object is stalled."""
    if not uids:
        memory.stalled_since_s = memory.events_read_s = None
        return False
    if memory.stalled_since_s is None:
        memory.stalled_since_s = now_s
    if memory.events_read_s is None:
        return is_told or now_s >= memory.stalled_since_s + PATIENCE_S
    return now_s >= memory.events_read_s + REREAD_S
