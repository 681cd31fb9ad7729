"""Observing a run: its objects, watched and unwatched, and the learner's signals."""

from __future__ import annotations

from typing import Protocol

from vcpo.api import VCPORun
from vcpo.api.cluster import Transport
from vcpo.control import RunSignals
from vcpo_operator.children.manifest import Kind
from vcpo_operator.cluster_api.certificates import RENEWED_BEFORE_S
from vcpo_operator.cluster_api.client import ApiError
from vcpo_operator.cluster_api.executor import Executor
from vcpo_operator.cluster_api.run_secrets import UnusableKeyError
from vcpo_operator.decisions.conflicts import (
    is_ours,
    unreadable_keys_conflict,
    unusable_key_conflict,
)
from vcpo_operator.decisions.snapshot import signals_period_s
from vcpo_operator.decisions.status_model import RunStatus
from vcpo_operator.names import RunKey, certificates_name, credential_name
from vcpo_operator.observed.records import ObservedState, RunRecord
from vcpo_operator.reconcile.event_causes import read_event_causes
from vcpo_operator.reconcile.memory import RunMemory
from vcpo_operator.signals.client import SignalSource

_UNWATCHED_PERIOD_S = 60.0
"""Time between two reads of the kinds that are not watched."""


class View(Protocol):
    """The cluster as the watches show it."""

    def run(self, key: RunKey) -> RunRecord | None:
        """Return a run; None when it does not exist."""

    def observed_state(self, key: RunKey) -> ObservedState:
        """Return the objects of a run, except PodMonitors and the Secret of keys."""


class Observer:
    """Observes one run at a time. One owner: the reconciler."""

    def __init__(self, view: View, executor: Executor, signals: SignalSource) -> None:
        self._view = view
        self._executor = executor
        self._signals = signals

    async def observe(
        self, record: RunRecord, run: VCPORun, memory: RunMemory, now_s: float
    ) -> ObservedState:
        """Return the objects of a run, unwatched kinds and causes from events included.

        now_s: Unix time.
        Raises: ApiError.
        """
        key = record.key
        watched, read_s = self._view.observed_state(key), memory.unwatched_read_s
        is_old = read_s is None or now_s - read_s >= _UNWATCHED_PERIOD_S
        if is_old or watched.lacks_reference:
            monitor = await self._executor.read(key, Kind.POD_MONITOR, key.name)
            memory.record_unwatched(Kind.POD_MONITOR, key.name, monitor)
            await self._read_secrets(record, run, memory, now_s)
            memory.unwatched_read_s = now_s
        observed = memory.with_unwatched(watched)
        for child in observed.children:
            if is_ours(child, record.uid):
                memory.record_child(child)
        return await read_event_causes(observed, key, memory, self._executor, now_s)

    async def signals(
        self, record: RunRecord, run: VCPORun, before: RunStatus, observed: ObservedState
    ) -> RunSignals | None:
        """Return the learner's newest signals; None when there is no learner.

        before: The status as the last reconcile left it.
        """
        if observed.learner is None or observed.learner.replicas == 0:
            await self._signals.disconnect(record.key)
            return None
        return await self._signals.fetch_signals(record.key, period_s=signals_period_s(run, before))

    async def _read_secrets(
        self, record: RunRecord, run: VCPORun, memory: RunMemory, now_s: float
    ) -> None:
        """Read the Secrets of the run; if that is forbidden, keep what is known."""
        named, own = run.spec.pods.keys_secret_name, credential_name(record.key.name)
        owner_uid = None if named else record.uid
        try:
            # First, so that no key is known before it is known whom to trust with it.
            await self._read_certificates(record, run, memory, now_s)
            secret = await self._executor.secrets.read_keys(
                record.key, named or own, owner_uid=owner_uid
            )
        except ApiError as error:
            if not error.is_forbidden:
                raise
            memory.keys_conflict = unreadable_keys_conflict(str(error))
            return
        except UnusableKeyError as error:
            memory.keys_conflict = unusable_key_conflict(str(error))
            return
        memory.keys_conflict = None
        if named is None:
            memory.record_unwatched(Kind.SECRET, own, secret)

    async def _read_certificates(
        self, record: RunRecord, run: VCPORun, memory: RunMemory, now_s: float
    ) -> None:
        """Read the Secret with the run's certificates, and whether they are to be renewed.

        Raises: ApiError.
        """
        pods, own = run.spec.pods, certificates_name(record.key.name)
        if pods.transport is Transport.PLAIN_TEXT:
            await self._executor.secrets.trust_the_network(record.key)
            return
        named = pods.tls_secret_name
        owner_uid = None if named else record.uid
        read = await self._executor.secrets.read_certificates(
            record.key, named or own, owner_uid=owner_uid
        )
        if named is None:
            memory.record_unwatched(Kind.SECRET, own, read.child)
            memory.certificates_due = now_s >= read.end_s - RENEWED_BEFORE_S
