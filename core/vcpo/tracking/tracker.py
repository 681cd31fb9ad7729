"""All sinks of a run: one call hands a record to each of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from vcpo.tracking.queued_sink import QueuedSink, ordered_records
from vcpo.tracking.services import open_sink
from vcpo.tracking.sink import Record, TrackedRun

_LOGGER = logging.getLogger(__name__)


class Tracker:
    """The sinks of one run; a run may have none. Owner: the learner's event loop."""

    def __init__(self) -> None:
        self._sinks: tuple[QueuedSink, ...] = ()

    def start(self, tracked: TrackedRun) -> None:
        """Start the sinks of a run; each opens in a thread of its own.

        What a sink lacks of the run's records so far comes first.
        """
        if settings := tracked.run.spec.tracking.sinks:
            history = tuple(ordered_records(tracked.run_dir))
            self.feed(
                QueuedSink(each.name, partial(open_sink, each, tracked), history=history)
                for each in settings
            )

    def feed(self, sinks: Iterable[QueuedSink]) -> None:
        """Hand these sinks everything that comes from here on."""
        self._sinks = tuple(sinks)

    def put(self, record: Record) -> None:
        """Hand a record to every sink; it takes microseconds and raises nothing.

        Before the start there are no sinks: the records have it, from which they get it then.
        """
        for sink in self._sinks:
            sink.put(record)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of records that each sink did not get."""
        return {sink.name: sink.dropped for sink in self._sinks}

    def close(
        self, *, failed: bool, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Wait until the sinks have everything, all together at most `timeout_s` seconds."""
        deadline_s = clock() + timeout_s
        for sink in self._sinks:
            sink.start_closing(failed=failed)
        for sink in self._sinks:
            has_all = sink.join(max(0.0, deadline_s - clock()))
            if sink.dropped or not has_all:
                _LOGGER.warning(
                    "tracking: sink %s did not get %d records; `vcpo export RUN --to %s` copies"
                    " all of them",
                    sink.name,
                    sink.dropped,
                    sink.name,
                )
