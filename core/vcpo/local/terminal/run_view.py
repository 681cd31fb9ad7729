"""The state of a run as people see it: one record for the live view and the panel."""

import logging
from collections import Counter
from dataclasses import dataclass

from vcpo.api import VCPORun
from vcpo.control.limits import ChangeKind
from vcpo.control.signals import RunSignals
from vcpo.judgement import Evidence, Judgement, judgements
from vcpo.records.journal import EventTail
from vcpo.report.numbers import decimal, duration
from vcpo.report.recorded_run import recorded_signals

OLD_S = 10.0
"""Age from which numbers are shown with their age, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run, its signals, and what its host knows."""

    run: VCPORun
    phase: str
    """`starting`, `restarting`, `silent`, how the run ended, or the phase that the learner
    reports."""
    signals: RunSignals
    workers_desired: int
    elapsed_s: float
    drain_s: float | None = None
    """Seconds since the learner was asked to save and to end; None if it was not."""

    @property
    def workers_ready(self) -> int:
        return sum(self.signals.ready_workers.values())

    @property
    def max_policy_lag_steps(self) -> int:
        return self.run.spec.algorithm.max_policy_lag_steps

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the last step."""
        signals = self.signals
        remaining = (self.run.spec.steps - signals.step) * signals.batch_trajectories
        rate = signals.consumed_per_s or (1.0 if remaining <= 0 else 0.0)
        return remaining / rate if rate > 0 else None

    @property
    def judgements(self) -> tuple[Judgement, ...]:
        return judgements(Evidence(spec=self.run.spec, signals=self.signals, phase=self.phase))


def run_view(
    run: VCPORun,
    signals: RunSignals | None,
    *,
    learner_serves: bool,
    workers_desired: int,
    elapsed_s: float,
) -> RunView:
    """Return the run's state for the live view; before the first signals it is `starting`."""
    if signals is None:
        phase = "starting"
    elif not learner_serves:
        phase = "restarting"
    elif signals.age_s >= OLD_S:
        phase = "silent"
    else:
        phase = signals.phase.value
    return RunView(
        run=run,
        phase=phase,
        signals=signals or recorded_signals(run),
        workers_desired=workers_desired,
        elapsed_s=elapsed_s,
    )


def of_last_step(view: RunView, field: str, form: str) -> str:
    """Return a number of the last step's record; form: as of `decimal`."""
    return decimal(getattr(view.signals.last, field, None), form)


def age_notices(view: RunView) -> list[str]:
    """Return a sentence on the age of the numbers if they are old."""
    if view.signals.age_s < OLD_S:
        return []
    age = duration(view.signals.age_s)
    return [f"the learner has not answered for {age}: the numbers are {age} old"]


def drain_notices(view: RunView) -> list[str]:
    """Return a sentence on what an interrupted run waits for, and for how long."""
    if view.drain_s is None:
        return []
    waited, limit = duration(view.drain_s), duration(view.run.spec.learner.drain_seconds)
    what = f"finishes step {view.signals.step + 1} if it has begun and saves a checkpoint"
    return [f"waits for the learner, which {what}: {waited} of at most {limit}"]


def printable(text: str) -> str:
    """Replace control characters by spaces, so that a message cannot control the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


_SHOWN_EACH = 3
_ALWAYS_SHOWN = {ChangeKind.THROTTLED}
"""Kinds that are rare, because a window of steps lies between two, and that matter each time."""


class EventFeed:
    """Selects the events of `tail` to show, without those of `own_source`.

    Of each kind it selects the first three, then the 10th, the 100th and so on with the count, so
    that an event per step does not scroll everything else away. A throttle is always shown.
    """

    def __init__(self, tail: EventTail, *, own_source: str) -> None:
        self._tail = tail
        self._own_source = own_source
        self._seen: Counter[tuple[str, str]] = Counter()

    def new_lines(self) -> list[str]:
        lines = []
        for event in self._tail.read():
            if event.source == self._own_source or event.level >= logging.ERROR:
                continue  # the last words of a failed run are its error
            kind = (event.source, event.kind)
            self._seen[kind] += 1
            number = 1 if event.kind in _ALWAYS_SHOWN else self._seen[kind]
            if number <= _SHOWN_EACH or number == 10 ** (len(str(number)) - 1):
                counted = f" ({number:,} of these so far)" if number > _SHOWN_EACH else ""
                lines.append(f"{event.kind}: {event.message}{counted}")
        return lines
