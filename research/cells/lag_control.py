"""The control loop of a cell: the lag limit that a host would set, decided after every step."""

from __future__ import annotations

from collections import deque

from vcpo.api import VCPORunSpec
from vcpo.control.decision import decide
from vcpo.control.limits import ControlLimits
from vcpo.control.signals import WINDOW_STEPS, RunSignals
from vcpo.control.state import ControlState
from vcpo.metrics.step_gauges import record_of_metrics
from vcpo.records.step_record import UpdateRecord, update_fields


class LagControl:
    """Calls `vcpo.control.decide` with the signals that a learner would report, without a clock."""

    def __init__(self, spec: VCPORunSpec) -> None:
        self._limits = ControlLimits.of(spec)
        self._state = ControlState.start(self._limits, now_s=0.0)
        self._ess_ratios: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.lags: list[int] = []
        """The limit of each batch so far."""

    @property
    def lag_steps(self) -> int:
        return self._state.throttle.lag_limit_steps

    def observe(self, step: int, update: UpdateRecord) -> None:
        """Decide after a step.

        step: its number, from 1.
        """
        self.lags.append(self.lag_steps)
        _, self._state = decide(self._limits, self._state, self.signals(step, update), float(step))

    def signals(self, step: int, update: UpdateRecord) -> RunSignals:
        """Return the signals of a run whose learner never waits."""
        if update.ess_ratio > 0:
            self._ess_ratios.append(update.ess_ratio)
        known = sorted(self._ess_ratios)
        last = record_of_metrics(
            {},
            **update_fields(update),
            step=step,
            ess_ratio_mean=sum(known) / len(known) if known else None,
            ess_ratio_low=known[(len(known) - 1) // WINDOW_STEPS] if known else None,
            lag_p50=self.lag_steps,
        )
        return RunSignals(
            last=last,
            policy_version=step,
            buffered=0,
            in_flight=0,
            batch_trajectories=1,
            lag_limit_steps=self.lag_steps,
            learner_idle_ratio=0.0,
        )
