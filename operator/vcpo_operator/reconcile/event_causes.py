"""Explanations: reads the events about what does not get on, seldom (docs/design/040)."""

from __future__ import annotations

import logging

from vcpo_operator.cluster_api.client import ApiError
from vcpo_operator.cluster_api.executor import Executor
from vcpo_operator.decisions.stalled import PATIENCE_S, REREAD_S, stalled_uids, with_event_causes
from vcpo_operator.names import RunKey
from vcpo_operator.observed.pod_causes import cause_from_events
from vcpo_operator.observed.records import ObservedState
from vcpo_operator.reconcile.memory import RunMemory

_LOGGER = logging.getLogger(__name__)


async def read_event_causes(
    observed: ObservedState, key: RunKey, memory: RunMemory, executor: Executor, now_s: float
) -> ObservedState:
    """What is observed, with the causes that events give for what does not get on.

    now_s: Unix time. An API server that gives no events leaves things unexplained.
    """
    uids = stalled_uids(observed)
    memory.causes = {uid: memory.causes[uid] for uid in uids if uid in memory.causes}
    if _is_due(memory, uids, now_s):
        memory.events_read_s = now_s
        for uid in uids:
            try:
                cause = cause_from_events(await executor.read_events(key, uid))
            except ApiError as error:
                _LOGGER.info("%s: no events: %s", key, error)
                break
            if cause is None:
                memory.causes.pop(uid, None)
            else:
                memory.causes[uid] = cause
    return with_event_causes(observed, memory.causes)


def _is_due(memory: RunMemory, uids: tuple[str, ...], now_s: float) -> bool:
    """Whether events are to be read now; keeps since when they would be of use."""
    if not uids:
        memory.unexplained_s = memory.events_read_s = None
        return False
    if memory.unexplained_s is None:
        memory.unexplained_s = now_s
    if memory.events_read_s is None:
        return now_s >= memory.unexplained_s + PATIENCE_S
    return now_s >= memory.events_read_s + REREAD_S
