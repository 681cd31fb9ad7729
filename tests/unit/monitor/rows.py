"""A row of a throttled run, for the tests of tables and screens."""

from __future__ import annotations

import dataclasses

from vcpo.local.terminal.run_view import RunView
from vcpo.monitor.run_row import RunRow

VIEW = RunView(
    run_name="countdown",
    phase="running",
    step=120,
    total_steps=400,
    reward_mean=0.431,
    accuracy=0.38,
    ess_ratio=0.23,
    on_policy_ess_ratio=0.92,
    learning_rate_scale=0.5,
    lag_p50=2,
    lag_max=5,
    lag_bound=8,
    admission_lag_steps=4,
    warning_level="critical",
    warning_score=0.71,
    buffered=48,
    in_flight=96,
    workers_ready=1,
    workers_desired=2,
    tokens_per_s=1234.0,
    elapsed_s=133.0,
    eta_s=311.0,
)


def row(place: str = "runs/countdown-001", age_s: float | None = 3.0, **changes) -> RunRow:
    return RunRow(place=place, view=dataclasses.replace(VIEW, **changes), age_s=age_s)
