"""A sink behind a bounded queue: it never delays its caller and never raises to it.

One thread opens the sink, feeds it and closes it. First the sink gets what it lacks of the run's
records: what it had not taken when the process before ended. What does not fit into the queue, and
what the sink fails on, is dropped and counted. A sink that hangs costs its own numbers only: other
sinks have threads of their own, and the thread does not keep the process alive.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Final

from vcpo.records.journal import read_events, read_metrics
from vcpo.records.step_record import StepRecord
from vcpo.tracking.sink import Record, Sink, deliver

CAPACITY: Final = 1000
"""Records that wait for a sink."""
_LOGGER = logging.getLogger(__name__)


class QueuedSink:
    """Owner: the event loop, but for the sink itself, which belongs to the thread."""

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        *,
        history: Sequence[tuple[Record, int]] = (),
        capacity: int = CAPACITY,
    ) -> None:
        """Start the thread.

        history: the records so far, each with the last step at that time; the sink gets first what
            it lacks of them.
        """
        self.name = name
        self._open_sink = open_sink
        self._history = history
        self._waiting: queue.Queue[tuple[Record, int] | None] = queue.Queue(capacity)
        """Records, each with the last step at that time; None wakes the thread up to end."""
        self._refused = 0
        """Records that found the queue full. Written by the event loop only."""
        self._failed = 0
        """Records that the sink raised on. Written by the thread only."""
        self._step = history[-1][1] if history else 0
        self._is_closing = False
        self._run_failed = False
        self._thread = threading.Thread(target=self._feed, name=f"sink-{name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of records that the sink did not get."""
        return self._refused + self._failed

    def put(self, record: Record) -> None:
        """Hand a record over; it is dropped if the queue is full or the sink is closed."""
        if isinstance(record, StepRecord):
            self._step = record.step
        if self._is_closing or self._waiting.full():
            self._refused += 1
        else:  # nobody else puts, so there is still room
            self._waiting.put_nowait((record, self._step))

    def start_closing(self, *, failed: bool) -> None:
        """Take no more records and let the thread end after those that wait.

        failed: whether the run failed.
        """
        self._run_failed = failed
        self._is_closing = True
        with contextlib.suppress(queue.Full):  # then the thread sees the flag after the last one
            self._waiting.put_nowait(None)

    def join(self, timeout_s: float) -> bool:
        """Wait until the sink has everything and is closed; return False if it takes longer."""
        self._thread.join(timeout_s)
        has_ended = not self._thread.is_alive()
        if not has_ended:
            self._refused += sum(item is not None for item in tuple(self._waiting.queue))
        return has_ended

    def _feed(self) -> None:
        sink: Sink | None = None
        try:
            sink = self._open_sink()
        except Exception as error:  # noqa: BLE001 - a client of a service may raise anything
            self._report("cannot be opened", error)
        else:
            self._catch_up(sink)
        while not (self._is_closing and self._waiting.empty()):
            item = self._waiting.get()
            if item is not None:
                self._deliver(sink, *item)
        if sink is not None:
            try:
                sink.close(failed=self._run_failed)
            except Exception as error:  # noqa: BLE001 - as above
                self._report("cannot be closed", error)

    def _catch_up(self, sink: Sink) -> None:
        """Deliver what the sink lacks of the history."""
        history, self._history = self._history, ()  # it may be large
        try:
            sent_steps: Collection[int] = sink.sent_steps()
        except Exception as error:  # noqa: BLE001 - as above
            self._report("cannot say which steps it has", error)
            sent_steps = ()
        for record, step in missing_records(history, sent_steps):
            self._deliver(sink, record, step)

    def _deliver(self, sink: Sink | None, record: Record, step: int) -> None:
        if sink is None:
            self._failed += 1
            return
        try:
            deliver(sink, record, step)
        except Exception as error:  # noqa: BLE001 - as above
            if not self._failed:
                self._report("fails", error)
            self._failed += 1

    def _report(self, what: str, error: Exception) -> None:
        _LOGGER.error(
            "tracking: sink %s %s: %s; the run continues, and vcpo_sink_dropped_total counts what"
            " the sink does not get",
            self.name,
            what,
            error,
            exc_info=error,
        )


_WHEN = attrgetter("time_unix_s")


def ordered_records(run_dir: Path) -> Iterator[tuple[Record, int]]:
    """Yield each record with the steps taken when it was made, without undone history."""
    metrics = read_metrics(run_dir)
    steps: tuple[Record, ...] = metrics.steps
    others: list[Record] = sorted(chain(metrics.evaluations, read_events(run_dir)), key=_WHEN)
    step = 0
    # Steps stay in order, also if the machine's clock was set back.
    for record in heapq.merge(steps, others, key=_WHEN):
        if isinstance(record, StepRecord):
            step = record.step
        yield record, step


def missing_records(
    records: Iterable[tuple[Record, int]], sent_steps: Collection[int]
) -> Iterator[tuple[Record, int]]:
    """Yield the records that a sink lacks, in their order.

    Of evaluations and events no sink says which it has. It gets those that came after the last step
    before its first gap, and may have some of them already.

    records: as `ordered_records` yields them.
    sent_steps: those that the sink has.
    """
    sent = frozenset(sent_steps)
    since_last: list[tuple[Record, int]] = []
    has_gap = False
    for record, step in records:
        if not isinstance(record, StepRecord):
            since_last.append((record, step))
        elif record.step not in sent:
            has_gap = True
            yield from since_last
            since_last.clear()
            yield record, step
        elif not has_gap:
            since_last.clear()
    yield from since_last
