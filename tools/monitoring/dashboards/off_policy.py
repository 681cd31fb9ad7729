"""The board `vcpo-off-policy`: is the data too old for its update, and what is done about it?"""

from typing import Final

from tools.monitoring.dashboards.board import (
    AxisUnit,
    Band,
    Board,
    Color,
    Kind,
    Query,
    Role,
    panel,
    row,
)
from tools.monitoring.dashboards.promql import (
    RATE_FACTORS,
    ROLLBACKS,
    above_zero,
    buckets,
    effective_rate,
    hourly_share,
    increase,
    value,
)
from tools.monitoring.rules import limit, threshold

_WARNING_BANDS: Final = (
    Band(None, Color.GOOD),
    Band(1 / 3, Color.WARNING),
    Band(2 / 3, Color.BAD),
    Band(limit("VCPOLearnerDead", "vcpo_collapse_warning_ratio"), Color.BAD),
)
_LOW_BACKOFF: Final = limit("VCPOLearningRateBackedOff", "vcpo_learning_rate_backoff_ratio")
_ON_POLICY: Final = value("vcpo_on_policy_ess_ratio")
_LOW_ESS: Final = f"clamp_min({value('vcpo_run_ess_floor_ratio')}, {threshold('lowRelativeEss'):g})"
"""Where the alert begins: the run's floor, or the chart's threshold if that is higher."""

_IN_A_ROW: Final = {
    "VCPOCollapseWarning": "vcpo_critical_steps_in_a_row",
    "VCPOCollapseImminent": "vcpo_critical_steps_in_a_row",
    "VCPORewardCollapsed": "vcpo_collapsed_steps_in_a_row",
    "VCPOEvaluationFalling": "vcpo_low_evaluations_in_a_row",
    "VCPOThrottledForLong": "vcpo_throttled_steps_in_a_row",
}
_ROW_LIMITS: Final = sorted({limit(alert, metric) for alert, metric in _IN_A_ROW.items()})
_UNSAVED_INTERVALS: Final = f"3 * {value('vcpo_run_checkpoint_interval_steps')}"
_UNSAVED_TIME: Final = (
    f"{threshold('staleCheckpointSeconds'):g} / {value('vcpo_learner_step_interval_seconds')}"
)
_UNSAVED_STEPS: Final = (
    f"{_UNSAVED_INTERVALS} > on (namespace, run) ({_UNSAVED_TIME}) or {_UNSAVED_TIME}"
)
"""The larger one of two limits, as the alert asks for both."""

_SKIPPED: Final = hourly_share(
    "vcpo_learner_skipped_steps_total", "reason", "vcpo_learner_steps_total"
)

_MAY_WE_STEP: Final = row(
    10,
    "May we step?",
    panel(
        11,
        "Effective sample size",
        "Of the last step, and mean and tenth percentile of ten steps. On policy it lies on the "
        "reference; below the floor the host halves the lag. Tokens far above trajectories: long "
        "responses.",
        Query(value("vcpo_ess_ratio"), "last", role=Role.FAINT),
        Query(value("vcpo_ess_mean_ratio"), "recent mean"),
        Query(value("vcpo_ess_low_ratio"), "low tenth"),
        Query(value("vcpo_token_ess_ratio"), "tokens", role=Role.FAINT),
        Query(_ON_POLICY, "on policy", role=Role.REFERENCE),
        Query(f"{_LOW_ESS} * on (namespace, run) {_ON_POLICY}", "floor", role=Role.LIMIT),
        maximum=1.0,
    ),
    panel(
        13,
        "Effective learning rate",
        "The effective rate is schedule x ESS x backoff of the spec's. ESS (or the trust region) "
        "acts step by step; a critical warning or a rollback halves the backoff.",
        Query(effective_rate(), "effective"),
        *map(Query, map(value, RATE_FACTORS), ("schedule", "ESS", "backoff")),
        maximum=1.0,
        bands=(Band(None, Color.BAD), Band(_LOW_BACKOFF, Color.GOOD)),
    ),
    panel(
        14,
        "Early warning of a collapse",
        "1/3 warns, 2/3 is critical: in the studies a collapse followed within eleven steps in "
        "the median, and a third came without. 1 is dead: the policy stands still.",
        Query(value("vcpo_collapse_warning_ratio"), "warning"),
        maximum=1.0,
        bands=_WARNING_BANDS,
    ),
    panel(
        18,
        "Steps in a row",
        "Two low evaluations are a ticket, as are three critical steps; ten under a limit of 0 or "
        "with a collapsed reward are a page, sixty throttled ones a ticket. Unsaved: what a crash "
        "would repeat.",
        Query(value("vcpo_critical_steps_in_a_row"), "critical"),
        Query(value("vcpo_collapsed_steps_in_a_row"), "reward collapsed"),
        Query(value("vcpo_throttled_steps_in_a_row"), "throttled"),
        Query(value("vcpo_skipped_steps_in_a_row"), "without an update"),
        Query(value("vcpo_low_evaluations_in_a_row"), "low evaluations"),
        Query(value("vcpo_learner_unsaved_steps"), "unsaved"),
        Query(value("vcpo_calibration_age_steps"), "since calibration", role=Role.FAINT),
        *(Query(f"{each:g}", f"alert, {each:g}", role=Role.LIMIT) for each in _ROW_LIMITS),
        Query(_UNSAVED_STEPS, "alert, unsaved", role=Role.LIMIT),
        unit=AxisUnit.STEPS,
    ),
    panel(
        17,
        "Mismatch and divergence",
        "Of fresh tokens, which hold no staleness; up to the limit it is rounding. The worst "
        "alone: that worker. The divergence is of all tokens, stale ones too. Zeros are drawn at "
        "1e-9.",
        Query(above_zero("vcpo_mismatch_nats"), "mean gap"),
        Query(above_zero("vcpo_divergence_nats"), "KL of all tokens"),
        Query(above_zero("vcpo_mismatch_worst_worker_nats"), "worst worker", role=Role.FAINT),
        Query(above_zero("vcpo_mismatch_limit_nats"), "limit", role=Role.LIMIT),
        unit=AxisUnit.NATS,
        minimum=None,
        is_logarithmic=True,
    ),
)

_WHY_OFF_POLICY: Final = row(
    20,
    "Why is it off-policy?",
    panel(
        21,
        "Lag of trained trajectories",
        "A band that rises is a queue that grows: generation is slow, or there are too many "
        "workers.",
        Query(buckets("vcpo_policy_lag_steps"), "{{le}}"),
        kind=Kind.HEATMAP,
        unit=AxisUnit.VERSIONS,
    ),
    panel(
        22,
        "Lag against its limits",
        "Ordered by the host, in force in the learner; apart for long: orders do not arrive. "
        "Below the bound the run is throttled. Lag above the bound of the spec is a bug.",
        Query(value("vcpo_token_lag_max_steps"), "oldest token"),
        Query(value("vcpo_token_lag_median_steps"), "median token"),
        Query(value("vcpo_run_admission_lag_steps"), "ordered", role=Role.REFERENCE),
        Query(value("vcpo_admission_lag_steps"), "in force", role=Role.REFERENCE),
        Query(value("vcpo_run_max_policy_lag_steps"), "bound", role=Role.LIMIT),
        unit=AxisUnit.VERSIONS,
    ),
    panel(
        23,
        "ESS by lag",
        "Lines apart: yes, and a lower lag helps. Lines together: no; compare the numerics of "
        "rollout workers and learner.",
        Query(value("vcpo_lag_ess_ratio", "lag"), "{{lag}} or more"),
        maximum=1.0,
    ),
    panel(
        25,
        "Work outstanding",
        "Admission keeps their sum below the limit. A full buffer makes data old; an empty one "
        "makes the learner wait.",
        Query(value("vcpo_trajectories_in_flight"), "in flight"),
        Query(value("vcpo_trajectories_buffered"), "buffered"),
        Query(
            f"({value('vcpo_admission_lag_steps')} + 1)"
            f" * on (namespace, run) {value('vcpo_batch_trajectories')}",
            "admitted",
            role=Role.REFERENCE,
        ),
        unit=AxisUnit.COUNT,
    ),
)

_WHO_MAKES_THE_UPDATE: Final = row(
    30,
    "Who makes the update?",
    panel(
        31,
        "Importance weights",
        "A narrow band around 0 is on policy. A long upper tail is a few trajectories that make "
        "the update.",
        Query(buckets("vcpo_log_importance_weight_nats"), "{{le}}"),
        kind=Kind.HEATMAP,
        unit=AxisUnit.NATS,
        minimum=None,
    ),
    panel(
        32,
        "Largest importance weight",
        "Weights are truncated at the cap of the spec, 8 unless set.",
        Query(above_zero("vcpo_importance_weight_max"), "largest weight"),
        minimum=None,
        is_logarithmic=True,
    ),
    panel(
        34,
        "Gradient norm",
        "Noise far above fresh data's and above the signal: staleness costs steps; the signal of "
        "one step scatters. A fall to 0, drawn at 1e-9, with the early warning is a dead policy.",
        Query(above_zero("vcpo_gradient_norm"), "before clipping"),
        Query(f"sqrt({above_zero('vcpo_gradient_signal')})", "signal"),
        Query(f"sqrt({above_zero('vcpo_gradient_noise')})", "noise"),
        Query(f"sqrt({above_zero('vcpo_gradient_fresh_noise')})", "noise of fresh data"),
        minimum=None,
        is_logarithmic=True,
    ),
)

_CONTROLLER: Final = row(
    50,
    "What did the controller do?",
    panel(
        52,
        "Decisions",
        "Tightened often and never relaxed: the lag is not the cause.",
        Query(increase("vcpo_run_throttles_total", "direction"), "{{direction}}"),
        Query(ROLLBACKS, "rolled back"),
        Query(increase("vcpo_learner_rollbacks_refused_total"), "rollback refused"),
        kind=Kind.EVENTS,
        unit=AxisUnit.COUNT,
    ),
)

_DID_IT_HELP: Final = row(
    60,
    "Did it help?",
    panel(
        61,
        "Reward",
        "A collapse is a reward that falls and does not return. The evaluation is on held-out "
        "prompts; a gap that grows is overfitting. Parts add up to the reward.",
        Query(value("vcpo_reward_mean"), "training"),
        Query(value("vcpo_evaluation_accuracy"), "evaluation"),
        Query(value("vcpo_reward_part", "part"), "part {{part}}"),
        minimum=None,
    ),
    panel(
        62,
        "Steps without an update",
        "`no_gradient`: all rewards are equal. `low_ess`, `early_warning`: limits of the spec "
        "refuse them. `non_finite_*`: a number is broken.",
        Query(_SKIPPED, "{{reason}}"),
        unit=AxisUnit.SHARE,
        maximum=1.0,
        bands=(Band(None, Color.GOOD), Band(threshold("skippedStepsRatio"), Color.BAD)),
    ),
)

OFF_POLICY: Final = Board(
    uid="vcpo-off-policy",
    title="VCPO / Off-policy health",
    description="Is the data of this run too old for its updates, why, and what was done about it?",
    tags=("vcpo", "off-policy"),
    has_run=True,
    rows=(_MAY_WE_STEP, _WHY_OFF_POLICY, _WHO_MAKES_THE_UPDATE, _CONTROLLER, _DID_IT_HELP),
)
