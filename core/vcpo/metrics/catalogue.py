"""Every metric of the project: name, type, help, labels, buckets.

Names follow https://prometheus.io/docs/practices/naming: the prefix `vcpo_`, base units, `_total`
for counters, `_ratio` for 0 to 1. Metrics of one step are declared in `vcpo.records.step_record`,
all others here. Alerts, dashboards and documents use these names only.

Labels are few and bounded: a run's name, a rollout group of its spec (at most 8), and closed sets
of words. Never a step, an id, a time or a message. Learner and rollout workers carry `run` (and
`group`) on all of their metrics; `namespace` and `pod` come with the scrape. A host exports metrics
of many runs and writes `namespace` and `run` itself (a local run has an empty namespace), so its
scrape needs `honorLabels`.
"""

from __future__ import annotations

from vcpo.metrics.metric import Metric, MetricKind
from vcpo.records.step_record import GAUGES

LEARNER_LABELS = ("run",)
"""Labels on all metrics of a learner."""

ROLLOUT_LABELS = ("run", "group")
"""Labels on all metrics of a rollout worker."""

HOST_LABELS = ("namespace", "run")
"""First labels of each metric of a host, which has several runs."""

CONDITION_STATUSES = ("True", "False", "Unknown")
"""Values of the label `status`, as Kubernetes writes them."""

_LAG_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_STEP_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_GENERATION_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SYNC_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_RECONCILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def _counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=MetricKind.COUNTER, help=help_text, labels=labels)


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, help=help_text, labels=labels)


def _measure(name: str, help_text: str) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, help=help_text, absent_until_set=True)


def _histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name=name, kind=MetricKind.HISTOGRAM, help=help_text, buckets=buckets)


BUILD_INFO = _gauge(
    "vcpo_build_info", "Always 1; the labels name the part and its version.", "part", "version"
)

LEARNER_STEP = _measure(
    "vcpo_learner_step",
    "Optimizer step whose numbers are shown; behind the policy version while it is published.",
)
LEARNER_STEPS = _counter(
    "vcpo_learner_steps_total", "Optimizer steps taken, skipped ones included."
)
LEARNER_SKIPPED_STEPS = _counter(
    "vcpo_learner_skipped_steps_total", "Optimizer steps that made no update, by reason.", "reason"
)
SKIPPED_STEPS_IN_A_ROW = _gauge(
    "vcpo_skipped_steps_in_a_row", "Optimizer steps since the last one that made an update."
)
LEARNER_STEP_DURATION = _histogram(
    "vcpo_learner_step_duration_seconds",
    "Time to compute and publish an update; the wait for its batch is not part of it.",
    _STEP_BUCKETS,
)
LEARNER_TOKENS = _counter("vcpo_learner_tokens_total", "Response tokens trained on.")
LEARNER_IDLE = _measure(
    "vcpo_learner_idle_ratio", "Share of recent time in which the learner waited for data."
)
LEARNER_PHASE = _gauge(
    "vcpo_learner_phase", "1 for the phase that the run is in, 0 for the others.", "phase"
)
LEARNER_CHECKPOINT_TIMESTAMP = _measure(
    "vcpo_learner_checkpoint_timestamp_seconds", "Unix time of the newest checkpoint."
)
LEARNER_DISK_FULL = _counter(
    "vcpo_learner_disk_full_total",
    "Attempts to write a checkpoint or the model that failed because the disk was full.",
)
ESS_MEAN = _measure("vcpo_ess_mean_ratio", "Mean ESS ratio in a window of recent steps.")
ESS_LOW = _measure(
    "vcpo_ess_low_ratio", "Tenth percentile of the ESS ratio in a window of recent steps."
)
STEP_GAUGES = {gauge.name: _measure(gauge.name, gauge.help) for _, gauge in GAUGES}
"""Numbers of the last step, as the step record declares them."""
LAG_ESS = _gauge(
    "vcpo_lag_ess_ratio",
    "ESS ratio of the last step's trajectories by lag; the label is the bucket's smallest lag.",
    "lag",
)
POLICY_LAG = _histogram(
    "vcpo_policy_lag_steps",
    "Age of the oldest token of each consumed trajectory, in policy versions.",
    _LAG_BUCKETS,
)
TOKEN_LAG_MEDIAN = _measure(
    "vcpo_token_lag_median_steps", "Median age of the last step's tokens, in policy versions."
)
TOKEN_LAG_MAX = _measure(
    "vcpo_token_lag_max_steps", "Largest age of a token of the last step, in policy versions."
)
POLICY_VERSION = _measure(
    "vcpo_policy_version", "Newest policy version that the learner published."
)
ADMISSION_LAG = _measure(
    "vcpo_admission_lag_steps", "Lag limit in force, for new leases and for trained tokens."
)
BATCH_TRAJECTORIES = _measure(
    "vcpo_batch_trajectories", "Trajectories that one optimizer step consumes."
)
TRAJECTORIES_LEASED = _counter("vcpo_trajectories_leased_total", "Trajectories leased to workers.")
TRAJECTORIES_CONSUMED = _counter("vcpo_trajectories_consumed_total", "Trajectories trained on.")
TRAJECTORIES_DROPPED = _counter(
    "vcpo_trajectories_dropped_total",
    "Trajectories leased and not trained on, by reason.",
    "reason",
)
TOKENS_WASTED = _counter(
    "vcpo_tokens_wasted_total",
    "Sampled tokens that reached the learner and were not trained on, by reason.",
    "reason",
)
TRAJECTORIES_IN_FLIGHT = _gauge(
    "vcpo_trajectories_in_flight", "Trajectories leased that have not arrived yet."
)
TRAJECTORIES_BUFFERED = _gauge(
    "vcpo_trajectories_buffered", "Trajectories accepted that wait for a batch."
)
ACCOUNTING_ERRORS = _counter(
    "vcpo_accounting_errors_total",
    "Times that leased was not in flight + buffered + consumed + dropped; above 0 is a bug.",
)
FAILURES_IN_A_ROW = _gauge(
    "vcpo_failures_in_a_row", "Failed generations since the last accepted trajectory."
)
WORKERS = _gauge(
    "vcpo_workers", "Rollout workers that called the learner lately, by rollout group.", "group"
)
WORKERS_BY_TRUST = _gauge(
    "vcpo_workers_by_trust",
    "Rollout workers by trust: trusted (delivered), new, doubted (let a lease expire).",
    "trust",
)
CALLS_REFUSED = _counter(
    "vcpo_learner_calls_refused_total",
    "Calls refused, by reason: token, deadline, message, streams or stalled (slow reader).",
    "reason",
)
EVALUATION_ACCURACY = _measure(
    "vcpo_evaluation_accuracy", "Mean reward of the newest evaluation on held-out prompts."
)

ROLLOUT_SAMPLES = _counter(
    "vcpo_rollout_samples_total", "Trajectories finished by this worker, by outcome.", "outcome"
)
ROLLOUT_FAILURES = _counter(
    "vcpo_rollout_failures_total",
    "Generations that failed on this worker, by cause, such as prompt, reward or timeout.",
    "cause",
)
ROLLOUT_TOKENS = _counter("vcpo_rollout_tokens_total", "Response tokens sampled by this worker.")
ROLLOUT_RESTARTED = _counter(
    "vcpo_rollout_restarted_total",
    "Multi-turn responses restarted because the environment did not repeat its earlier turns.",
)
ROLLOUT_TOKENS_RELEASED = _counter(
    "vcpo_rollout_tokens_released_total",
    "Tokens of partial responses that this worker released for another lease to resume.",
)
ROLLOUT_TOKENS_RESUMED = _counter(
    "vcpo_rollout_tokens_resumed_total",
    "Tokens of partial responses that came with a lease and were resumed by this worker.",
)
ROLLOUT_GENERATION = _histogram(
    "vcpo_rollout_generation_seconds",
    "Time from the grant of a lease to its last trajectory.",
    _GENERATION_BUCKETS,
)
ROLLOUT_INFLIGHT = _gauge("vcpo_rollout_inflight", "Trajectories that this worker is generating.")
ROLLOUT_WEIGHTS_VERSION = _measure(
    "vcpo_rollout_weights_version", "Policy version that this worker samples from."
)
ROLLOUT_WEIGHT_SYNC_DURATION = _histogram(
    "vcpo_rollout_weight_sync_duration_seconds",
    "Time to fetch, verify and swap in a policy version.",
    _SYNC_BUCKETS,
)
ROLLOUT_WEIGHT_SYNC_BYTES = _counter(
    "vcpo_rollout_weight_sync_bytes_total",
    "Bytes received to update weights, by source: learner, peer or archive.",
    "source",
)
ROLLOUT_PEERS_AVOIDED = _counter(
    "vcpo_rollout_peers_avoided_total",
    "Weight transfers from other workers given up, by reason: slow, failed or corrupt.",
    "reason",
)
ROLLOUT_WEIGHT_UPDATES_IN_FLIGHT = _counter(
    "vcpo_rollout_weight_updates_in_flight_total",
    "Policy versions swapped in while sequences were being generated.",
)
ROLLOUT_SANDBOX_MISSING = _gauge(
    "vcpo_rollout_sandbox_missing",
    "1 for each sandbox protection that this system lacks; absent where no programs run.",
    "protection",
)
ROLLOUT_SANDBOX_FOLDERS_LEFT = _measure(
    "vcpo_rollout_sandbox_folders_left",
    "Folders of sandboxed programs that could not be removed; absent where none run.",
)
ROLLOUT_LEASE_WAIT = _counter(
    "vcpo_rollout_lease_wait_seconds_total", "Time in which the worker had free slots and no lease."
)

RUN_INFO = _gauge(
    "vcpo_run_info",
    "Always 1; the labels name the model, the environment and the method.",
    *HOST_LABELS,
    "model",
    "environment",
    "baseline",
)
RUN_CONDITION = _gauge(
    "vcpo_run_condition",
    "1 for the current status of a condition, 0 for the others.",
    *HOST_LABELS,
    "condition",
    "status",
)
RUN_REPLICAS = _gauge(
    "vcpo_run_replicas",
    "Rollout workers of a rollout group, by state: desired or ready.",
    *HOST_LABELS,
    "group",
    "state",
)
RUN_DECISIONS = _counter(
    "vcpo_run_decisions_total",
    "Decisions about the number of workers, by direction and reason.",
    *HOST_LABELS,
    "direction",
    "reason",
)

RUN_FAILURES = _counter(
    "vcpo_run_process_failures_total",
    "Processes of a run that failed, by part (learner, rollout) and cause (ended, hung).",
    *HOST_LABELS,
    "part",
    "cause",
)

OPERATOR_RECONCILES = _counter(
    "vcpo_operator_reconciles_total", "Reconciles of a run, by result: ok, error or bug.", "result"
)
OPERATOR_RECONCILE_DURATION = _histogram(
    "vcpo_operator_reconcile_duration_seconds",
    "Duration of one reconcile of a run, API calls included.",
    _RECONCILE_BUCKETS,
)
OPERATOR_QUEUE_DEPTH = _gauge("vcpo_operator_queue_depth", "Runs that wait for a reconcile.")
OPERATOR_QUEUE_OLDEST = _gauge(
    "vcpo_operator_queue_oldest_seconds",
    "Time that the longest waiting run has waited for its reconcile.",
)
OPERATOR_API_REQUESTS = _counter(
    "vcpo_operator_api_requests_total",
    "Requests of the reconciler to the Kubernetes API; code 0 means no response.",
    "verb",
    "resource",
    "code",
)
OPERATOR_RECREATED = _counter(
    "vcpo_operator_recreated_total",
    "Objects that somebody else deleted and the operator created again, by kind.",
    "kind",
)
OPERATOR_WATCH_EVENT_TIMESTAMP = _gauge(
    "vcpo_operator_watch_event_timestamp_seconds",
    "Unix time of the newest event of a watched resource.",
    "resource",
)
OPERATOR_WATCH_ECHO_LAG = _gauge(
    "vcpo_operator_watch_echo_lag_seconds",
    "Age of the oldest own write that the watch has not delivered; 0 when there is none.",
)
OPERATOR_LOOP_LAG = _gauge(
    "vcpo_operator_loop_lag_seconds", "Delay of the latest timer of the operator's event loop."
)

LEARNER = (
    LEARNER_STEP,
    LEARNER_STEPS,
    LEARNER_SKIPPED_STEPS,
    SKIPPED_STEPS_IN_A_ROW,
    LEARNER_STEP_DURATION,
    LEARNER_TOKENS,
    LEARNER_IDLE,
    LEARNER_PHASE,
    LEARNER_CHECKPOINT_TIMESTAMP,
    LEARNER_DISK_FULL,
    *STEP_GAUGES.values(),
    ESS_MEAN,
    ESS_LOW,
    LAG_ESS,
    POLICY_LAG,
    TOKEN_LAG_MEDIAN,
    TOKEN_LAG_MAX,
    POLICY_VERSION,
    ADMISSION_LAG,
    BATCH_TRAJECTORIES,
    TRAJECTORIES_LEASED,
    TRAJECTORIES_CONSUMED,
    TRAJECTORIES_DROPPED,
    TOKENS_WASTED,
    TRAJECTORIES_IN_FLIGHT,
    TRAJECTORIES_BUFFERED,
    ACCOUNTING_ERRORS,
    FAILURES_IN_A_ROW,
    WORKERS,
    WORKERS_BY_TRUST,
    CALLS_REFUSED,
    EVALUATION_ACCURACY,
)
"""What a learner exports, besides `BUILD_INFO`."""

ROLLOUT = (
    ROLLOUT_SAMPLES,
    ROLLOUT_FAILURES,
    ROLLOUT_TOKENS,
    ROLLOUT_RESTARTED,
    ROLLOUT_TOKENS_RELEASED,
    ROLLOUT_TOKENS_RESUMED,
    ROLLOUT_GENERATION,
    ROLLOUT_INFLIGHT,
    ROLLOUT_WEIGHTS_VERSION,
    ROLLOUT_WEIGHT_SYNC_DURATION,
    ROLLOUT_WEIGHT_SYNC_BYTES,
    ROLLOUT_PEERS_AVOIDED,
    ROLLOUT_WEIGHT_UPDATES_IN_FLIGHT,
    ROLLOUT_SANDBOX_MISSING,
    ROLLOUT_SANDBOX_FOLDERS_LEFT,
    ROLLOUT_LEASE_WAIT,
)
"""What a rollout worker exports, besides `BUILD_INFO`."""

HOST = (RUN_INFO, RUN_CONDITION, RUN_REPLICAS, RUN_DECISIONS, RUN_FAILURES)
"""What a host (local or operator) exports for its runs, besides `BUILD_INFO`."""

OPERATOR = (
    OPERATOR_RECONCILES,
    OPERATOR_RECONCILE_DURATION,
    OPERATOR_QUEUE_DEPTH,
    OPERATOR_QUEUE_OLDEST,
    OPERATOR_API_REQUESTS,
    OPERATOR_RECREATED,
    OPERATOR_WATCH_EVENT_TIMESTAMP,
    OPERATOR_WATCH_ECHO_LAG,
    OPERATOR_LOOP_LAG,
)
"""What the operator exports of itself, besides `BUILD_INFO` and `HOST`."""

ALL = (BUILD_INFO, *LEARNER, *ROLLOUT, *HOST, *OPERATOR)
"""Every metric."""
