"""The board `vcpo-rollout`: are the workers there, do they generate, and from which weights?"""

from typing import Final

from tools.monitoring.dashboards.board import AxisUnit, Board, Kind, Query, Role, panel, row
from tools.monitoring.dashboards.promql import value, worker_quantile, worker_rates, worker_values
from tools.monitoring.rules import threshold


def _replicas(state: str) -> str:
    each = value("vcpo_run_replicas", "group", where=f'state="{state}"')
    return f"sum by (namespace, run) ({each})"


_FAILING: Final = (
    f"{threshold('environmentFailuresRatio'):g}"
    f" * {worker_rates('sum', 'vcpo_rollout_environment_seconds_count')}"
)
_LATE_WEIGHTS: Final = (
    f"clamp_min({threshold('weightSyncLagShare'):g} * {value('vcpo_run_max_policy_lag_steps')}, 1)"
    f" * on (namespace, run) {value('vcpo_learner_step_interval_seconds')}"
)

_ARE_THEY_THERE: Final = row(
    10,
    "Are the workers there?",
    panel(
        11,
        "Workers",
        "Ready below desired: pods that start, crash or find no node. Heard of below ready: "
        "workers that do not reach the learner.",
        Query(_replicas("desired"), "desired", role=Role.REFERENCE),
        Query(_replicas("ready"), "ready"),
        Query(f"sum by (namespace, run) ({value('vcpo_workers', 'group')})", "heard of"),
        unit=AxisUnit.COUNT,
    ),
)

_DO_THEY_GENERATE: Final = row(
    20,
    "Do they generate?",
    panel(
        21,
        "Tokens of a worker",
        "Least, mean and most of all workers. A least far below the mean is one slow or idle "
        "machine.",
        Query(worker_rates("max", "vcpo_rollout_tokens_total"), "most"),
        Query(worker_rates("avg", "vcpo_rollout_tokens_total"), "mean"),
        Query(worker_rates("min", "vcpo_rollout_tokens_total"), "least"),
        unit=AxisUnit.TOKENS_PER_SECOND,
    ),
    panel(
        22,
        "In flight on a worker",
        "0 for a worker that has no lease: admission is full. Hung calls that only rise: a client "
        "in the environment lacks a timeout.",
        Query(worker_values("max", "vcpo_rollout_in_flight"), "most"),
        Query(worker_values("avg", "vcpo_rollout_in_flight"), "mean"),
        Query(worker_values("min", "vcpo_rollout_in_flight"), "least"),
        Query(worker_values("max", "vcpo_rollout_environment_hung_calls"), "hung calls, most"),
        Query(value("vcpo_failures_in_a_row"), "failed in a row"),
        unit=AxisUnit.COUNT,
    ),
    panel(
        25,
        "Outcomes",
        "`lease_ended`: the learner no longer wanted it. `released`: given back for another lease.",
        Query(worker_rates("sum", "vcpo_rollout_samples_total", "outcome"), "{{outcome}}"),
        kind=Kind.STACK,
        unit=AxisUnit.PER_SECOND,
    ),
)

_HOW_OLD_ARE_THE_WEIGHTS: Final = row(
    30,
    "How old are their weights?",
    panel(
        31,
        "Versions behind",
        "Each version behind is a step of lag from the start. A worst that rises is one worker "
        "that does not get its weights.",
        Query(worker_values("avg", "vcpo_rollout_weights_age_versions"), "mean"),
        Query(worker_values("max", "vcpo_rollout_weights_age_versions"), "worst"),
        unit=AxisUnit.VERSIONS,
    ),
    panel(
        32,
        "Duration of leases, weights and calls",
        "From a lease to its last trajectory; to fetch, verify and swap in a version; a call to "
        "the environment. A p95 of calls near that of a lease: the environment is the bottleneck. "
        "Weights that take some steps are lag that no limit removes.",
        Query(worker_quantile(0.5, "vcpo_rollout_generation_seconds"), "lease, p50"),
        Query(worker_quantile(0.95, "vcpo_rollout_generation_seconds"), "lease, p95"),
        Query(worker_quantile(0.5, "vcpo_rollout_weight_sync_duration_seconds"), "weights, p50"),
        Query(worker_quantile(0.95, "vcpo_rollout_weight_sync_duration_seconds"), "weights, p95"),
        Query(worker_quantile(0.5, "vcpo_rollout_environment_seconds"), "call, p50"),
        Query(worker_quantile(0.95, "vcpo_rollout_environment_seconds"), "call, p95"),
        Query(_LATE_WEIGHTS, "alert: weights, p95", role=Role.LIMIT),
        unit=AxisUnit.SECONDS,
    ),
    panel(
        33,
        "Bytes of weights",
        "Read by source, and sent by the learner. A store that workers see relieves the learner; "
        "deltas are smaller than full versions.",
        Query(
            worker_rates("sum", "vcpo_rollout_weight_sync_bytes_total", "source"), "from {{source}}"
        ),
        Query(
            worker_rates("sum", "vcpo_weights_served_bytes_total", "form"),
            "learner, {{form}}",
            role=Role.FAINT,
        ),
        unit=AxisUnit.BYTES_PER_SECOND,
    ),
)

_WHAT_HOLDS_THEM_UP: Final = row(
    40,
    "What holds them up?",
    panel(
        42,
        "Failed calls and generations",
        "Calls: `raised` is an exception of the environment's code. Generations: `prompt` and "
        "`reward` are its code, `timeout` a slow one.",
        Query(
            worker_rates("sum", "vcpo_rollout_environment_failures_total", "kind"), "call: {{kind}}"
        ),
        Query(worker_rates("sum", "vcpo_rollout_failures_total", "cause"), "generation: {{cause}}"),
        Query(_FAILING, "alert: calls", role=Role.LIMIT),
        kind=Kind.STACK,
        unit=AxisUnit.PER_SECOND,
    ),
)

ROLLOUT_FLEET: Final = Board(
    uid="vcpo-rollout",
    title="VCPO / Rollout fleet",
    description="Are the workers of this run there, do they generate, and from which weights?",
    tags=("vcpo", "rollout"),
    has_run=True,
    rows=(_ARE_THEY_THERE, _DO_THEY_GENERATE, _HOW_OLD_ARE_THE_WEIGHTS, _WHAT_HOLDS_THEM_UP),
)
