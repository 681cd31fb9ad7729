"""Rows of the board `vcpo-run` about the work: its speed, what is lost, and what a crash costs."""

from __future__ import annotations

from typing import Final

from tools.monitoring.dashboards.board import (
    AxisUnit,
    Band,
    Color,
    Kind,
    Panel,
    Query,
    Role,
    Row,
)
from tools.monitoring.dashboards.promql import (
    hourly_share,
    increase,
    of_part,
    quantile,
    selector,
    value,
    worker_rates,
    worker_values,
)
from tools.monitoring.rules import threshold


def _resident(part: str) -> str:
    """Return the resident memory of the largest process of a part."""
    return f"max by (namespace, run) ({of_part(part, selector('process_resident_memory_bytes'))})"


_GPU_TOTAL: Final = value("vcpo_learner_device_memory_bytes", where='state="total"')
_STALLED: Final = (
    f"clamp_min(5 * {value('vcpo_learner_step_interval_seconds')},"
    f" {threshold('stalledLearnerSeconds'):g})"
)

_DROPPED: Final = hourly_share(
    "vcpo_trajectories_dropped_total", "reason", "vcpo_trajectories_leased_total"
)

HOW_FAST: Final = Row(
    id=30,
    question="How fast is it, and where does the time go?",
    panels=(
        Panel(
            id=31,
            slug="step-age",
            title="Time since the last step",
            question="Does the learner still take steps, and how old are checkpoint "
            "and evaluation?",
            reading="A saw-tooth as high as a step is long. A line that only rises is a learner "
            "that hangs, or waits for data: see its stages. It pages at five usual steps, ten "
            "minutes at least.",
            unit=AxisUnit.SECONDS,
            queries=(
                Query(f"time() - {value('vcpo_learner_step_timestamp_seconds')}", "last step"),
                Query(
                    f"time() - {value('vcpo_learner_checkpoint_timestamp_seconds')}",
                    "checkpoint",
                    role=Role.FAINT,
                ),
                Query(
                    f"time() - {value('vcpo_evaluation_timestamp_seconds')}",
                    "evaluation",
                    role=Role.FAINT,
                ),
                Query(value("vcpo_learner_step_interval_seconds"), "a step with its wait, mean"),
                Query(quantile(0.5, "vcpo_learner_step_duration_seconds"), "an update, p50"),
                Query(quantile(0.95, "vcpo_learner_step_duration_seconds"), "an update, p95"),
                Query(_STALLED, "alert", role=Role.LIMIT),
            ),
        ),
        Panel(
            id=32,
            slug="throughput",
            title="Tokens",
            question="Do workers sample what the learner trains?",
            reading="Sampled above trained for long: responses are dropped.",
            unit=AxisUnit.TOKENS_PER_SECOND,
            queries=(
                Query(value("vcpo_learner_tokens_per_second"), "trained"),
                Query(worker_rates("sum", "vcpo_rollout_tokens_total"), "sampled"),
            ),
        ),
        Panel(
            id=33,
            slug="stages",
            title="Where the learner's time goes",
            question="Where do the seconds of a step go?",
            reading="Of the last step, from the end of the one before. `wait` asks for more "
            "workers, `publish` for faster storage or network, the rest for a faster device.",
            kind=Kind.STACK,
            unit=AxisUnit.SECONDS,
            queries=(Query(value("vcpo_learner_step_stage_seconds", "stage"), "{{stage}}"),),
        ),
        Panel(
            id=35,
            slug="idle",
            title="Idle learner and workers",
            question="Who waits for whom?",
            reading="The learner for data: raise `maxReplicas`. The workers for leases: the "
            "learner is the bottleneck, and fewer workers do; under a throttle it is on purpose. "
            "Above one half it alerts.",
            unit=AxisUnit.SHARE,
            maximum=1.0,
            queries=(
                Query(value("vcpo_learner_idle_ratio"), "learner"),
                Query(
                    worker_rates("avg", "vcpo_rollout_lease_wait_seconds_total"), "workers, mean"
                ),
                Query(
                    worker_rates("max", "vcpo_rollout_lease_wait_seconds_total"),
                    "workers, most",
                    role=Role.FAINT,
                ),
                Query(f"{threshold('starvedIdleRatio'):g}", "alert", role=Role.LIMIT),
            ),
        ),
    ),
)

WHAT_IS_LOST: Final = Row(
    id=40,
    question="What is lost?",
    panels=(
        Panel(
            id=41,
            slug="drops",
            title="Dropped trajectories",
            question="Which share of an hour's leased trajectories is never trained on, and why?",
            reading="`surplus` is resumed by the next lease; `throttled`, `rolled_back` and "
            "`no_signal` are dropped on purpose. The sum of the others is wasted work, and "
            "alerts above a tenth.",
            kind=Kind.STACK,
            unit=AxisUnit.SHARE,
            bands=(Band(None, Color.GOOD), Band(threshold("wastedSamplesRatio"), Color.BAD)),
            queries=(Query(_DROPPED, "{{reason}}"),),
        ),
    ),
)

AFTER_A_CRASH: Final = Row(
    id=50,
    question="What would a crash cost?",
    panels=(
        Panel(
            id=52,
            slug="restarts",
            title="What went wrong",
            question="What ended, was refused, lost, or set aside?",
            reading="The events of the run name each cause. Accounting errors are a bug: keep the "
            "run directory and report it.",
            kind=Kind.EVENTS,
            unit=AxisUnit.COUNT,
            queries=(
                Query(increase("vcpo_run_learner_restarts_total"), "learner restarted"),
                Query(increase("vcpo_workers_set_aside_total", "cause"), "set aside: {{cause}}"),
                Query(value("vcpo_learner_lost_changes"), "changes lost in the redo log"),
                Query(increase("vcpo_accounting_errors_total"), "accounting errors"),
            ),
        ),
        Panel(
            id=54,
            slug="memory",
            title="Memory",
            question="How near are learner and workers to their memory limits?",
            reading="Reserved memory that grows step by step is fragmentation, resident memory "
            "that grows a leak. A process over its limit ends as OOMKilled.",
            unit=AxisUnit.BYTES,
            queries=(
                Query(_resident("learner"), "learner"),
                Query(_resident("rollout"), "worker, most"),
                Query(value("vcpo_learner_device_memory_bytes", "state"), "GPU, {{state}}"),
                Query(
                    worker_values("max", "vcpo_rollout_device_memory_bytes", "state"),
                    "a worker's GPU, {{state}}",
                    role=Role.FAINT,
                ),
                Query(value("vcpo_learner_disk_free_bytes"), "disk, free", role=Role.FAINT),
                Query(value("vcpo_learner_checkpoint_bytes"), "a checkpoint", role=Role.FAINT),
                Query(
                    f"{threshold('gpuMemoryRatio'):g} * {_GPU_TOTAL}", "alert: GPU", role=Role.LIMIT
                ),
                Query(
                    f"2 * {value('vcpo_learner_checkpoint_bytes')}",
                    "alert: disk, free",
                    role=Role.LIMIT,
                ),
            ),
        ),
    ),
)
