"""Sends a run's records to a tracking service, from a process of its own.

    python -m vcpo.tracking.follow RUN_FILE RUN_DIR SINK

The learner starts one for each entry of `spec.tracking.sinks`. It reads the run's own records and
sends what the service lacks, so a service that is slow, absent or full costs the learner nothing,
and what could not be sent is sent later. Its standard input ends with the learner: then it sends
what is left and ends, within `LAST_S`.
"""

import fcntl
import heapq
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Final

from vcpo.api import VCPORun, load_run
from vcpo.records.journal import (
    EventRecord,
    EventTail,
    Journal,
    MetricsTail,
    failure_of,
    read_events,
)
from vcpo.records.step_record import StepRecord
from vcpo.service import logs
from vcpo.service.process import module_command
from vcpo.tracking.sink import Record, Sink, TrackedRun, deliver, open_sink

LAST_S: Final = 15.0
"""Seconds after the end of the learner in which the rest is sent."""
_PAUSE_S: Final = 2.0
_RETRY_S: Final = 30.0
"""Pause after a failure of the service, before it is opened anew."""
_WHEN: Final = attrgetter("time_unix_s")
_LOGGER = logging.getLogger(__name__)


class RecordTail:
    """Reads a run's records, each with the steps taken when it was made.

    What a restart undid before it was read is left out.
    """

    def __init__(self, run_dir: Path) -> None:
        self._metrics = MetricsTail(run_dir, from_start=True)
        self._events = EventTail(run_dir, from_start=True)
        self._step = 0

    def read(self) -> Iterator[tuple[Record, int]]:
        metrics = self._metrics.read()
        steps: tuple[Record, ...] = metrics.steps
        others: list[Record] = sorted(chain(metrics.evaluations, self._events.read()), key=_WHEN)
        # Steps stay in order, also if the machine's clock was set back.
        for record in heapq.merge(steps, others, key=_WHEN):
            if isinstance(record, StepRecord):
                self._step = record.step
            yield record, self._step


def missing_records(
    records: Iterable[tuple[Record, int]], sent_steps: Collection[int]
) -> Iterator[tuple[Record, int]]:
    """Yield the records that a sink lacks, in their order.

    Of evaluations and events no sink says which it has. It gets those that came after the last step
    before its first gap, and may have some of them already.

    records: as `RecordTail` yields them.
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


def follow(
    run_dir: Path,
    connect: Callable[[], Sink],
    wait: Callable[[float], bool],
    *,
    name: str = "a tracking service",
) -> None:
    """Send what a service lacks of a run, then what comes, until the run's learner has ended.

    connect: opens the sink; it is opened anew after it has failed.
    wait: waits so many seconds, or until the learner has ended; returns whether it has.
    name: of the sink, in the event that tells of its failures once, until it takes records again.
    """
    sink, is_over, is_told = None, False, False
    while True:
        pause_s = _PAUSE_S
        try:
            if sink is None:
                sink, tail = connect(), RecordTail(run_dir)
                records = missing_records(tail.read(), sink.sent_steps())
            else:
                records = tail.read()
            for record, step in records:
                deliver(sink, record, step)
                is_told = False
            if is_over:
                return sink.close(failed=failure_of(read_events(run_dir)) is not None)
        except Exception as error:  # a client of a service may raise anything
            _LOGGER.exception("tracking: the service did not take a record; it is sent later")
            if not is_told:
                _tell(run_dir, name, error)
            is_told = True
            sink, pause_s = None, _RETRY_S
            if is_over:
                return None
        is_over = wait(pause_s)


def _tell(run_dir: Path, name: str, error: Exception) -> None:
    message = (
        f"{name} did not take the run's records ({type(error).__name__}: {error}); they are sent"
        " when it does, or by `vcpo export --to`"
    )
    record = EventRecord(
        time_unix_s=time.time(), source="tracking", kind="TrackingFailed", message=message
    )
    Journal(run_dir).event(record)


class Followers:
    """The processes that send a run's records. Owner: the learner."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, run: VCPORun, run_file: Path, run_dir: Path) -> None:
        for index in range(len(run.spec.tracking.sinks)):
            command = module_command(__name__, str(run_file), str(run_dir), str(index))
            process = subprocess.Popen(  # noqa: S603 - our own module
                command, stdin=subprocess.PIPE, env={**os.environ, logs.END_VARIABLE: ""}
            )
            self._processes.append(process)

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        deadline_s = time.monotonic() + LAST_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                _LOGGER.warning("tracking: a service did not take all records: vcpo export --to")
                process.kill()
                process.wait()


def _watch_input(has_ended: threading.Event) -> None:
    """Wait for the end of standard input, to which nobody writes; then end the process in time."""
    os.read(sys.stdin.fileno(), 1)
    has_ended.set()
    time.sleep(LAST_S)
    os._exit(1)


def main() -> None:
    """Follow the run that the command line names."""
    run_file, run_dir, index = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    logs.configure("tracking")
    run = load_run(run_file)
    settings = run.spec.tracking.sinks[index]
    tracked = TrackedRun(run=run, run_dir=run_dir)
    has_ended = threading.Event()
    threading.Thread(target=_watch_input, args=[has_ended], daemon=True).start()
    with tracked.path(settings.name, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # that of the learner before may have something left
        follow(run_dir, lambda: open_sink(settings, tracked), has_ended.wait, name=settings.name)


if __name__ == "__main__":
    main()
