"""All sinks of a run: one call hands a record to each of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from vcpo.spec.tracking import SinkName
from vcpo.tracking.queued_sink import QueuedSink
from vcpo.tracking.services import open_sink
from vcpo.tracking.sink import Record, TrackedRun

_LOGGER = logging.getLogger(__name__)


class Tracker:
    """The sinks of one run; a run may have none. Owner: the learner's event loop."""

    def __init__(self) -> None:
        self._sinks: tuple[QueuedSink, ...] | None = None
        self._early: list[Record] = []
        """Events of the learner's start, before the sinks can be started."""

    def start(self, tracked: TrackedRun) -> None:
        """Start the sinks of a run; each opens in a thread of its own."""
        self.feed(
            QueuedSink(settings.name, partial(open_sink, settings, tracked))
            for settings in tracked.run.spec.tracking.sinks
        )

    def feed(self, sinks: Iterable[QueuedSink]) -> None:
        """Hand these sinks what has come so far, and everything that comes later."""
        self._sinks = tuple(sinks)
        for record in self._early:
            self.put(record)
        self._early.clear()

    def put(self, record: Record) -> None:
        """Hand a record to every sink; it takes microseconds and raises nothing."""
        if self._sinks is None:
            self._early.append(record)
            return
        for sink in self._sinks:
            sink.put(record)

    @property
    def dropped(self) -> Mapping[SinkName, int]:
        """Number of records that each sink did not get."""
        return {sink.name: sink.dropped for sink in self._sinks or ()}

    def close(
        self, *, failed: bool, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Wait until the sinks have everything, all together at most `timeout_s` seconds."""
        deadline_s = clock() + timeout_s
        sinks = self._sinks or ()
        for sink in sinks:
            sink.start_closing(failed=failed)
        for sink in sinks:
            has_all = sink.join(max(0.0, deadline_s - clock()))
            if sink.dropped or not has_all:
                _LOGGER.warning(
                    "tracking: sink %s did not get %d records; `vcpo export RUN --to %s` copies"
                    " all of them",
                    sink.name,
                    sink.dropped,
                    sink.name,
                )
