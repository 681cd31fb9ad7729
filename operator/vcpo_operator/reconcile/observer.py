"""Observing a run: its objects, watched and unwatched, and the learner's signals."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vcpo.api import VCPORun
from vcpo.api.cluster import Transport
from vcpo.control.signals import RunSignals
from vcpo_operator.children.manifest import Kind
from vcpo_operator.cluster_api.client import ApiError
from vcpo_operator.cluster_api.executor import Executor
from vcpo_operator.cluster_api.run_secrets import RENEWED_BEFORE_S, first_end_s
from vcpo_operator.decisions.conflicts import (
    is_ours,
    unreadable_keys_conflict,
    unusable_key_conflict,
)
from vcpo_operator.decisions.snapshot import signals_period_s
from vcpo_operator.names import Role, RunKey, certificate_hosts, certificates_name, credential_name
from vcpo_operator.observed.parse import (
    LearnerAccess,
    UnusableKeyError,
    check_keys,
    learner_trust,
    parse_child,
    secret_data,
    steering_key,
)
from vcpo_operator.observed.records import ObservedState, RunRecord
from vcpo_operator.observed.status import RunStatus
from vcpo_operator.reconcile.memory import RunMemory
from vcpo_operator.signals.client import SignalSource

_PERIOD_S = 60.0
"""Time between two reads of what is not watched, while the learner has a node or keys are amiss."""
_PERIOD_AT_REST_S = 300.0
_ABSENCE_S = 3600.0
"""Time for which the absence of a PodMonitor that the run does not ask for is remembered."""


class View(Protocol):
    """The cluster as the watches show it."""

    def run(self, key: RunKey) -> RunRecord | None:
        """Return a run; None when it does not exist."""

    def observed_state(self, key: RunKey) -> ObservedState:
        """Return the objects of a run, except PodMonitors and the Secret of keys."""


@dataclass(slots=True, eq=False)
class Observer:
    """Observes one run at a time. One owner: the reconciler. Each call may raise ApiError."""

    _view: View
    _executor: Executor
    _signals: SignalSource

    async def observe(
        self, record: RunRecord, run: VCPORun, memory: RunMemory, before: RunStatus, *, now_s: float
    ) -> ObservedState:
        key, watched = record.key, self._view.observed_state(record.key)
        if _is_read_due(watched, memory, before, record.generation, now_s):
            absent_s = 0.0 if run.spec.pods.pod_monitor else _ABSENCE_S
            if memory.monitor_read_s is None or now_s - memory.monitor_read_s >= absent_s:
                monitor = await self._executor.read(key, Kind.POD_MONITOR, key.name)
                memory.record_unwatched(Kind.POD_MONITOR, key.name, monitor)
                memory.monitor_read_s = now_s
            await self._read_secrets(record, run, memory, now_s)
            memory.unwatched_read_s, memory.read_generation = now_s, record.generation
        observed = memory.with_unwatched(watched)
        for child in observed.children:
            if is_ours(child, record.uid):
                memory.record_child(child)
        return observed

    async def signals(
        self, record: RunRecord, run: VCPORun, before: RunStatus, observed: ObservedState
    ) -> RunSignals | None:
        """Return the learner's newest signals; None when there is no learner."""
        if observed.learner is None or observed.learner.replicas == 0:
            await self._signals.disconnect(record.key)
            return None
        return await self._signals.fetch_signals(record.key, period_s=signals_period_s(run, before))

    async def _read_secrets(
        self, record: RunRecord, run: VCPORun, memory: RunMemory, now_s: float
    ) -> None:
        """Read the Secrets of the run; if that is forbidden, keep what is known.

        The connections get the key for steering and the authority; nothing else is kept.
        """
        key, pods, trust = record.key, run.spec.pods, None
        if pods.transport is Transport.PLAIN_TEXT:
            memory.certificate_end_s = None
        try:
            if pods.transport is not Transport.PLAIN_TEXT:
                own, is_own = certificates_name(key.name), pods.tls_secret_name is None
                data = await self._read_secret(record, memory, own, pods.tls_secret_name)
                trust = learner_trust(key, data)
                ends_s = _end_s(data, list(certificate_hosts(key)) if is_own else ["tls"])
                memory.certificate_end_s = ends_s
                if is_own:
                    memory.certificates_due = now_s >= (ends_s or 0.0) - RENEWED_BEFORE_S
            named, own = pods.keys_secret_name, credential_name(key.name)
            data = await self._read_secret(record, memory, own, named)
        except ApiError as error:
            if not error.is_forbidden:
                raise
            memory.keys_conflict = unreadable_keys_conflict(str(error))
            return
        access = LearnerAccess(steering_key=steering_key(data), trust=trust)
        await self._executor.set_access(key, access)
        try:
            check_keys(data, named or own)
        except UnusableKeyError as error:
            memory.keys_conflict = unusable_key_conflict(str(error))
        else:
            memory.keys_conflict = None

    async def _read_secret(
        self, record: RunRecord, memory: RunMemory, own: str, named: str | None
    ) -> dict[str, bytes]:
        """Return the content of a Secret; nothing of one that is somebody else's.

        own: Name of the run's own Secret. named: the one that the user named; None if none is.
        """
        body = await self._executor.read_secret(record.key, named or own)
        if named is not None:
            return secret_data(body)
        existing = None if body is None else parse_child(Kind.SECRET, body)
        memory.record_unwatched(Kind.SECRET, own, existing)
        is_readable = existing is not None and is_ours(existing, record.uid)
        return secret_data(body) if is_readable else {}


def _is_read_due(
    watched: ObservedState, memory: RunMemory, before: RunStatus, generation: int, now_s: float
) -> bool:
    """Whether the unwatched kinds are read now; those of a run that has ended are read once."""
    if memory.unwatched_read_s is None or memory.read_generation != generation:
        return True
    if before.completion_s is not None and watched.learner is None:
        return False
    is_awake = any(pod.node for pod in watched.pods_of(Role.LEARNER)) or memory.keys_conflict
    period_s = _PERIOD_S if is_awake else _PERIOD_AT_REST_S
    return watched.lacks_reference or now_s - memory.unwatched_read_s >= period_s


def _end_s(data: Mapping[str, bytes], names: Sequence[str]) -> float | None:
    with contextlib.suppress(ValueError, KeyError):
        return first_end_s(data, names)
    return None
