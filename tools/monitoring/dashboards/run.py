"""The board `vcpo-run`: does a run learn, how fast, what is lost, and what would a crash cost?"""

from typing import Final

from tools.monitoring.dashboards.board import (
    AxisUnit,
    Band,
    Board,
    Color,
    Kind,
    Query,
    Role,
    Words,
    panel,
    row,
)
from tools.monitoring.dashboards.promql import (
    RUNS,
    buckets,
    effective_rate,
    hourly_share,
    increase,
    of_part,
    quantile,
    selector,
    value,
    worker_rates,
    worker_values,
)
from tools.monitoring.rules import limit, threshold

_LOW_BACKOFF: Final = limit("VCPOLearningRateBackedOff", "vcpo_learning_rate_backoff_ratio")
_STEP: Final = value("vcpo_learner_step", scope=RUNS)
_LIFECYCLE: Final = 'condition=~"Complete|Failed|Suspended"'
_WANTED: Final = value("vcpo_run_replicas", "group", where='state="desired"', scope=RUNS)
_RUNNING: Final = {"Training": Color.GOOD, "Complete|Succeeded": Color.NEUTRAL}
_READY: Final = Words("ready", _RUNNING | {".*": Color.WARNING})
_STABLE: Final = Words("stable", {"Critical|Dead": Color.BAD, ".*": Color.GOOD})
_ENVIRONMENT: Final = (
    f"max by (namespace, run, environment) ({selector('vcpo_run_info', scope=RUNS)})"
)
_HEALTH: Final = 'condition!~"Complete|Failed|Suspended"'


def _reason(condition: str, column: str) -> str:
    series = selector("vcpo_run_condition_reason", f'condition="{condition}"', RUNS)
    renamed = f'label_replace({series} == 1, "{column}", "$1", "reason", "(.+)")'
    return f"max by (namespace, run, {column}) ({renamed})"


def _condition(status: str, matcher: str, state: int) -> str:
    series = selector("vcpo_run_condition", f'{matcher},status="{status}"')
    return f"({series} == 1) * {state}"


_STATES: Final = (("True", _HEALTH), ("False", _HEALTH), ("Unknown", _HEALTH), ("True", _LIFECYCLE))
_CONDITIONS: Final = " or ".join(
    _condition(*each, state) for each, state in zip(_STATES, (1, 0, 2, 3), strict=True)
)

_WHICH_RUN: Final = row(
    10,
    "Which run needs me?",
    panel(
        11,
        "Runs",
        "A run that trains has the reason Training. ESS is that of recent steps over that on "
        "policy, the rate the share of the spec's that is taken; the checkpoint is the newest "
        "one's age. A run has one environment, and its reward is of that one. A run without "
        "numbers sends no metrics. A name leads to its board.",
        Query(_reason("Ready", "ready"), "", words=_READY),
        Query(_reason("Stable", "stable"), "", words=_STABLE),
        Query(_ENVIRONMENT, ""),
        Query(_STEP, "step"),
        Query(value("vcpo_run_steps", scope=RUNS), "of"),
        Query(
            f"({value('vcpo_run_steps', scope=RUNS)} - on (namespace, run) {_STEP})"
            " / on (namespace, run) (max by (namespace, run)"
            f" (deriv({selector('vcpo_learner_step', scope=RUNS)}[1h])) > 0)",
            "left",
            unit=AxisUnit.SECONDS,
        ),
        Query(value("vcpo_reward_mean", scope=RUNS), "reward"),
        Query(value("vcpo_evaluation_accuracy", scope=RUNS), "evaluation"),
        Query(
            f"{value('vcpo_ess_mean_ratio', scope=RUNS)} / on (namespace, run)"
            f" {value('vcpo_on_policy_ess_ratio', scope=RUNS)}",
            "ESS",
            unit=AxisUnit.SHARE,
            bands=(Band(None, Color.BAD), Band(threshold("lowRelativeEss"), Color.GOOD)),
        ),
        Query(
            effective_rate(RUNS),
            "rate",
            unit=AxisUnit.SHARE,
            bands=(Band(None, Color.BAD), Band(_LOW_BACKOFF, Color.GOOD)),
        ),
        Query(value("vcpo_learning_rate", scope=RUNS), "learning rate"),
        Query(value("vcpo_token_lag_max_steps", scope=RUNS), "lag"),
        Query(value("vcpo_admission_lag_steps", scope=RUNS), "limit"),
        Query(value("vcpo_run_max_policy_lag_steps", scope=RUNS), "bound"),
        Query(f"sum by (namespace, run) ({value('vcpo_workers', 'group', scope=RUNS)})", "workers"),
        Query(f"sum by (namespace, run) ({_WANTED})", "wanted"),
        Query(
            f"time() - {value('vcpo_learner_checkpoint_timestamp_seconds', scope=RUNS)}",
            "checkpoint",
            unit=AxisUnit.SECONDS,
        ),
        Query(value("vcpo_run_learner_restarts_total", scope=RUNS), "restarts"),
        kind=Kind.TABLE,
    ),
    panel(
        12,
        "Conditions",
        "Green is good. Blue marks a run that is complete, failed or suspended.",
        Query(f"max by (namespace, run, condition) ({_CONDITIONS})", "{{condition}}"),
        kind=Kind.STATES,
    ),
)

_DOES_IT_LEARN: Final = row(
    20,
    "Does it learn?",
    panel(
        22,
        "Rewards of trajectories",
        "Two bands are solved and unsolved prompts. One band has nothing to teach.",
        Query(buckets("vcpo_reward"), "{{le}}"),
        kind=Kind.HEATMAP,
    ),
    panel(
        23,
        "Prompts that teach nothing",
        "A group of equal rewards has no gradient. If most are, prompts are too hard or too easy, "
        "or the reward does not tell responses apart; it alerts unless the reward is at its "
        "maximum. Cut responses that grow ask for a larger `sampling.maxNewTokens`.",
        Query(value("vcpo_equal_groups_ratio"), "groups of equal rewards"),
        Query(value("vcpo_cut_responses_ratio"), "cut responses"),
        Query(f"{threshold('equalRewardGroupsRatio'):g}", "alert", role=Role.LIMIT),
        unit=AxisUnit.SHARE,
        maximum=1.0,
    ),
    panel(
        25,
        "Length of responses",
        "A longest twentieth at `sampling.maxNewTokens` is responses that are cut. A fall of all "
        "three to a few tokens is a policy that gives up.",
        Query(quantile(0.95, "vcpo_response_tokens"), "p95"),
        Query(quantile(0.5, "vcpo_response_tokens"), "median"),
        Query(quantile(0.05, "vcpo_response_tokens"), "p5"),
        unit=AxisUnit.TOKENS,
    ),
)


def _resident(part: str) -> str:
    return f"max by (namespace, run) ({of_part(part, selector('process_resident_memory_bytes'))})"


_GPU_TOTAL: Final = value("vcpo_learner_device_memory_bytes", where='state="total"')
_STALLED: Final = (
    f"clamp_min(5 * {value('vcpo_learner_step_interval_seconds')},"
    f" {threshold('stalledLearnerSeconds'):g})"
)

_DROPPED: Final = hourly_share(
    "vcpo_trajectories_dropped_total", "reason", "vcpo_trajectories_leased_total"
)

_HOW_FAST: Final = row(
    30,
    "How fast is it, and where does the time go?",
    panel(
        31,
        "Time since the last step",
        "A saw-tooth as high as a step is long. A line that only rises is a learner that hangs, "
        "or waits for data: see its stages. It pages at five usual steps, ten minutes at least.",
        Query(f"time() - {value('vcpo_learner_step_timestamp_seconds')}", "last step"),
        Query(
            f"time() - {value('vcpo_learner_checkpoint_timestamp_seconds')}",
            "checkpoint",
            role=Role.FAINT,
        ),
        Query(
            f"time() - {value('vcpo_evaluation_timestamp_seconds')}", "evaluation", role=Role.FAINT
        ),
        Query(value("vcpo_learner_step_interval_seconds"), "a step with its wait, mean"),
        Query(quantile(0.5, "vcpo_learner_step_duration_seconds"), "an update, p50"),
        Query(quantile(0.95, "vcpo_learner_step_duration_seconds"), "an update, p95"),
        Query(_STALLED, "alert", role=Role.LIMIT),
        unit=AxisUnit.SECONDS,
    ),
    panel(
        32,
        "Tokens",
        "Sampled above trained for long: responses are dropped.",
        Query(value("vcpo_learner_tokens_per_second"), "trained"),
        Query(worker_rates("sum", "vcpo_rollout_tokens_total"), "sampled"),
        unit=AxisUnit.TOKENS_PER_SECOND,
    ),
    panel(
        33,
        "Where the learner's time goes",
        "Of the last step, from the end of the one before. `wait` asks for more workers, "
        "`publish` for faster storage or network, the rest for a faster device.",
        Query(value("vcpo_learner_step_stage_seconds", "stage"), "{{stage}}"),
        kind=Kind.STACK,
        unit=AxisUnit.SECONDS,
    ),
    panel(
        35,
        "Idle learner and workers",
        "The learner for data: raise `maxReplicas`. The workers for leases: the learner is the "
        "bottleneck, and fewer workers do; under a throttle it is on purpose. Above one half it "
        "alerts.",
        Query(value("vcpo_learner_idle_ratio"), "learner"),
        Query(worker_rates("avg", "vcpo_rollout_lease_wait_seconds_total"), "workers, mean"),
        Query(
            worker_rates("max", "vcpo_rollout_lease_wait_seconds_total"),
            "workers, most",
            role=Role.FAINT,
        ),
        Query(f"{threshold('starvedIdleRatio'):g}", "alert", role=Role.LIMIT),
        unit=AxisUnit.SHARE,
        maximum=1.0,
    ),
)

_WHAT_IS_LOST: Final = row(
    40,
    "What is lost?",
    panel(
        41,
        "Dropped trajectories",
        "`surplus` is resumed by the next lease; `throttled`, `rolled_back` and `no_signal` are "
        "dropped on purpose. The sum of the others is wasted work, and alerts above a tenth.",
        Query(_DROPPED, "{{reason}}"),
        kind=Kind.STACK,
        unit=AxisUnit.SHARE,
        bands=(Band(None, Color.GOOD), Band(threshold("wastedSamplesRatio"), Color.BAD)),
    ),
)

_AFTER_A_CRASH: Final = row(
    50,
    "What would a crash cost?",
    panel(
        52,
        "What went wrong",
        "The events of the run name each cause. Accounting errors are a bug: keep the run "
        "directory and report it.",
        Query(increase("vcpo_run_learner_restarts_total"), "learner restarted"),
        Query(increase("vcpo_workers_set_aside_total", "cause"), "set aside: {{cause}}"),
        Query(value("vcpo_learner_lost_changes"), "changes lost in the redo log"),
        Query(increase("vcpo_accounting_errors_total"), "accounting errors"),
        kind=Kind.EVENTS,
        unit=AxisUnit.COUNT,
    ),
    panel(
        54,
        "Memory",
        "Reserved memory that grows step by step is fragmentation, resident memory that grows a "
        "leak. A process over its limit ends as OOMKilled.",
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
        Query(f"{threshold('gpuMemoryRatio'):g} * {_GPU_TOTAL}", "alert: GPU", role=Role.LIMIT),
        Query(
            f"2 * {value('vcpo_learner_checkpoint_bytes')}", "alert: disk, free", role=Role.LIMIT
        ),
        unit=AxisUnit.BYTES,
    ),
)

RUN_OVERVIEW: Final = Board(
    uid="vcpo-run",
    title="VCPO / Run overview",
    description="Does this run learn, how fast, what is lost, and what would a crash cost?",
    tags=("vcpo", "run"),
    has_run=True,
    rows=(_WHICH_RUN, _DOES_IT_LEARN, _HOW_FAST, _WHAT_IS_LOST, _AFTER_A_CRASH),
)
