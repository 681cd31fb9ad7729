"""The live view's content, computed from the learner's signals."""

from __future__ import annotations

from collections.abc import Iterator

from vcpo.api import VCPORun
from vcpo.learner_control import optional_field, set_aside_notice
from vcpo.local.terminal.run_view import OLD_S, RunView
from vcpo.records.no_update import no_update_notice
from vcpo.wire.phase import phase_from_message
from vcpo.wire.v1 import control_pb2

_FAILURES_NOTICED = 3
"""Number of failed generations in a row from which a notice is shown."""


def run_view(
    run: VCPORun,
    signals: control_pb2.Signals | None,
    *,
    signals_age_s: float | None,
    learner_serves: bool,
    workers_desired: int,
    elapsed_s: float,
) -> RunView:
    """Return the run's state for the live view; before the first signals it is `starting`."""
    is_known = signals is not None
    if signals is None:
        signals = control_pb2.Signals(total_steps=run.spec.steps, on_policy_ess_ratio=1.0)
        phase = "starting"
    elif not learner_serves:
        phase = "restarting"
    elif signals_age_s is not None and signals_age_s >= OLD_S:
        phase = "silent"
    else:
        phase = phase_from_message(signals.phase).value
    remaining = (signals.total_steps - signals.step) * signals.batch_trajectories
    consumed_per_s = signals.consumed_trajectories_per_second
    return RunView(
        run_name=run.metadata.name,
        phase=phase,
        step=signals.step,
        total_steps=run.spec.steps,
        reward_mean=optional_field(signals, "reward_mean"),
        accuracy=signals.evaluations[-1].accuracy if signals.evaluations else None,
        ess_ratio=optional_field(signals, "ess_ratio"),
        on_policy_ess_ratio=signals.on_policy_ess_ratio,
        learning_rate_scale=optional_field(signals, "learning_rate_scale"),
        lag_p50=optional_field(signals, "lag_p50"),
        lag_max=optional_field(signals, "lag_max"),
        lag_bound=run.spec.algorithm.max_policy_lag_steps,
        admission_lag_steps=signals.admission_lag_steps if is_known else None,
        warning_level=optional_field(signals, "warning_level"),
        warning_score=optional_field(signals, "warning_score"),
        buffered=signals.trajectories.buffered,
        in_flight=signals.trajectories.in_flight,
        workers_ready=len(signals.workers),
        workers_desired=workers_desired,
        tokens_per_s=signals.generated_tokens_per_second,
        elapsed_s=elapsed_s,
        eta_s=remaining / consumed_per_s if consumed_per_s > 0 else None,
        signals_age_s=signals_age_s,
        step_age_s=None if signals_age_s is None else signals.seconds_since_step + signals_age_s,
        signals_max_age_s=run.spec.control.signals_max_age_seconds,
        notices=tuple(_notices(signals)),
    )


def _notices(signals: control_pb2.Signals) -> Iterator[str]:
    if signals.failures_in_a_row >= _FAILURES_NOTICED and signals.failures:
        latest = signals.failures[0].message
        yield f"The last {signals.failures_in_a_row} generations failed: {latest}"
    if signals.mismatch:
        yield signals.mismatch
    if set_aside := set_aside_notice(signals):
        yield set_aside
    notice = no_update_notice(signals.skipped_steps_in_a_row, signals.skip_reason)
    if notice is not None:
        yield notice
