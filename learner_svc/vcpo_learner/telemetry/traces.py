"""The learner's part of the traces: what is sampled, how long it waits, which step it ends in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from vcpo import tracing
from vcpo_learner.ledger.lease import Lease

if TYPE_CHECKING:
    from opentelemetry.trace import Span

ONE_LEASE_IN: Final = 100
"""One lease in so many is traced, beginning with the first."""
_MOST_BUFFERED: Final = 256
"""Traced groups in the buffer; groups that were dropped there make room for others."""


class TrajectoryTraces:
    """Decides which trajectories are traced and follows them. Owner: the learner's event loop."""

    def __init__(self, one_lease_in: int = ONE_LEASE_IN) -> None:
        self._one_lease_in = one_lease_in
        self._buffered: dict[str, Span] = {}
        """Open spans of traced groups, by lease, oldest first."""

    def grant(self, lease: Lease) -> str:
        """Return the `traceparent` of a training lease that is traced; empty for the others."""
        if not tracing.is_on() or lease.grant_number % self._one_lease_in:
            return ""
        attributes: tracing.Attributes = {
            "vcpo.lease": lease.lease_id,
            "vcpo.prompt_index": lease.prompt_index,
            "vcpo.policy_version": lease.policy_version,
        }
        with tracing.root("lease.grant", attributes):
            return tracing.traceparent()

    def accept(self, lease_id: str, parent: str) -> None:
        """Begin the wait of a group in the buffer.

        parent: `traceparent` of the submission; empty if the lease is not traced.
        """
        if lease_id in self._buffered:
            return
        span = tracing.begin("buffer", parent, {"vcpo.lease": lease_id})
        if span is not None:
            if len(self._buffered) >= _MOST_BUFFERED:
                self._buffered.pop(next(iter(self._buffered))).end()
            self._buffered[lease_id] = span

    @contextlib.contextmanager
    def step(self, groups: Sequence[Lease], policy_version: int) -> Iterator[None]:
        """Record the block as the update of a batch, if a traced group is in the batch."""
        spans = [
            span
            for group in groups
            if (span := self._buffered.pop(group.lease_id, None)) is not None
        ]
        for span in spans:
            span.end()
        if not spans:
            yield
            return
        attributes = {
            "vcpo.step": policy_version + 1,
            "vcpo.policy_version": policy_version,
            "vcpo.groups": len(groups),
        }
        links = [span.get_span_context() for span in spans]
        with tracing.root("update", attributes, links=links):
            yield

    def record_stages(self, durations_s: Mapping[str, float]) -> None:
        """Record the stages of the update that has just ended, one after the other.

        The tensor thread measures only how long each took, and may enter a stage twice.
        """
        start_s = time.time() - sum(durations_s.values())
        for name, duration_s in durations_s.items():
            tracing.record(name, start_s=start_s, end_s=start_s + duration_s)
            start_s += duration_s

    @contextlib.contextmanager
    def publication(self, policy_version: int) -> Iterator[None]:
        """Record the block as the publication of a version, if its update is traced."""
        with tracing.child("publish", {"vcpo.policy_version": policy_version}):
            yield
