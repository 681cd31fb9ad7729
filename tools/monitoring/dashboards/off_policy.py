"""The board `vcpo-off-policy`: is the data too old for its update, and what is done about it?"""

from __future__ import annotations

from typing import Final

from tools.monitoring.dashboards.board import (
    AxisUnit,
    Band,
    Board,
    Color,
    Kind,
    Panel,
    Query,
    Role,
    Row,
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

_MAY_WE_STEP: Final = Row(
    id=10,
    question="May we step?",
    panels=(
        Panel(
            id=11,
            title="Effective sample size",
            text="Of the last step, and mean and tenth percentile of ten steps. On policy it lies "
            "on the reference; below the floor the host halves the lag. Tokens far above "
            "trajectories: long responses.",
            maximum=1.0,
            queries=(
                Query(value("vcpo_ess_ratio"), "last", role=Role.FAINT),
                Query(value("vcpo_ess_mean_ratio"), "recent mean"),
                Query(value("vcpo_ess_low_ratio"), "low tenth"),
                Query(value("vcpo_token_ess_ratio"), "tokens", role=Role.FAINT),
                Query(_ON_POLICY, "on policy", role=Role.REFERENCE),
                Query(f"{_LOW_ESS} * on (namespace, run) {_ON_POLICY}", "floor", role=Role.LIMIT),
            ),
        ),
        Panel(
            id=13,
            title="Effective learning rate",
            text="The effective rate is schedule x ESS x backoff of the spec's. ESS (or the trust "
            "region) acts step by step; a critical warning or a rollback halves the backoff.",
            maximum=1.0,
            bands=(Band(None, Color.BAD), Band(_LOW_BACKOFF, Color.GOOD)),
            queries=(
                Query(effective_rate(), "effective"),
                *map(Query, map(value, RATE_FACTORS), ("schedule", "ESS", "backoff")),
            ),
        ),
        Panel(
            id=14,
            title="Early warning of a collapse",
            text="1/3 warns, 2/3 is critical: in the studies a collapse followed within eleven "
            "steps in the median, and a third came without. 1 is dead: the policy stands "
            "still.",
            maximum=1.0,
            bands=_WARNING_BANDS,
            queries=(Query(value("vcpo_collapse_warning_ratio"), "warning"),),
        ),
        Panel(
            id=18,
            title="Steps in a row",
            text="Two low evaluations are a ticket, as are three critical steps; ten under a limit "
            "of 0 or with a collapsed reward are a page, sixty throttled ones a ticket. "
            "Unsaved: what a crash would repeat.",
            unit=AxisUnit.STEPS,
            queries=(
                Query(value("vcpo_critical_steps_in_a_row"), "critical"),
                Query(value("vcpo_collapsed_steps_in_a_row"), "reward collapsed"),
                Query(value("vcpo_throttled_steps_in_a_row"), "throttled"),
                Query(value("vcpo_skipped_steps_in_a_row"), "without an update"),
                Query(value("vcpo_low_evaluations_in_a_row"), "low evaluations"),
                Query(value("vcpo_learner_unsaved_steps"), "unsaved"),
                Query(value("vcpo_calibration_age_steps"), "since calibration", role=Role.FAINT),
                *(Query(f"{each:g}", f"alert, {each:g}", role=Role.LIMIT) for each in _ROW_LIMITS),
                Query(_UNSAVED_STEPS, "alert, unsaved", role=Role.LIMIT),
            ),
        ),
        Panel(
            id=17,
            title="Mismatch and divergence",
            text="Of fresh tokens, which hold no staleness; up to the limit it is rounding. The "
            "worst alone: that worker. The divergence is of all tokens, stale ones too. Zeros "
            "are drawn at 1e-9.",
            unit=AxisUnit.NATS,
            minimum=None,
            is_logarithmic=True,
            queries=(
                Query(above_zero("vcpo_mismatch_nats"), "mean gap"),
                Query(above_zero("vcpo_divergence_nats"), "KL of all tokens"),
                Query(
                    above_zero("vcpo_mismatch_worst_worker_nats"), "worst worker", role=Role.FAINT
                ),
                Query(above_zero("vcpo_mismatch_limit_nats"), "limit", role=Role.LIMIT),
            ),
        ),
    ),
)

_WHY_OFF_POLICY: Final = Row(
    id=20,
    question="Why is it off-policy?",
    panels=(
        Panel(
            id=21,
            title="Lag of trained trajectories",
            text="A band that rises is a queue that grows: generation is slow, or there are too "
            "many workers.",
            kind=Kind.HEATMAP,
            unit=AxisUnit.VERSIONS,
            queries=(Query(buckets("vcpo_policy_lag_steps"), "{{le}}"),),
        ),
        Panel(
            id=22,
            title="Lag against its limits",
            text="Ordered by the host, in force in the learner; apart for long: orders do not "
            "arrive. Below the bound the run is throttled. Lag above the bound of the spec is "
            "a bug.",
            unit=AxisUnit.VERSIONS,
            queries=(
                Query(value("vcpo_token_lag_max_steps"), "oldest token"),
                Query(value("vcpo_token_lag_median_steps"), "median token"),
                Query(value("vcpo_run_admission_lag_steps"), "ordered", role=Role.REFERENCE),
                Query(value("vcpo_admission_lag_steps"), "in force", role=Role.REFERENCE),
                Query(value("vcpo_run_max_policy_lag_steps"), "bound", role=Role.LIMIT),
            ),
        ),
        Panel(
            id=23,
            title="ESS by lag",
            text="Lines apart: yes, and a lower lag helps. Lines together: no; compare the "
            "numerics of rollout workers and learner.",
            maximum=1.0,
            queries=(Query(value("vcpo_lag_ess_ratio", "lag"), "{{lag}} or more"),),
        ),
        Panel(
            id=25,
            title="Work outstanding",
            text="Admission keeps their sum below the limit. A full buffer makes data old; an "
            "empty one makes the learner wait.",
            unit=AxisUnit.COUNT,
            queries=(
                Query(value("vcpo_trajectories_in_flight"), "in flight"),
                Query(value("vcpo_trajectories_buffered"), "buffered"),
                Query(
                    f"({value('vcpo_admission_lag_steps')} + 1)"
                    f" * on (namespace, run) {value('vcpo_batch_trajectories')}",
                    "admitted",
                    role=Role.REFERENCE,
                ),
            ),
        ),
    ),
)

_WHO_MAKES_THE_UPDATE: Final = Row(
    id=30,
    question="Who makes the update?",
    panels=(
        Panel(
            id=31,
            title="Importance weights",
            text="A narrow band around 0 is on policy. A long upper tail is a few trajectories "
            "that make the update.",
            kind=Kind.HEATMAP,
            unit=AxisUnit.NATS,
            minimum=None,
            queries=(Query(buckets("vcpo_log_importance_weight_nats"), "{{le}}"),),
        ),
        Panel(
            id=32,
            title="Largest importance weight",
            text="Weights are truncated at the cap of the spec, 8 unless set.",
            minimum=None,
            is_logarithmic=True,
            queries=(Query(above_zero("vcpo_importance_weight_max"), "largest weight"),),
        ),
        Panel(
            id=34,
            title="Gradient norm",
            text="Spikes together with a low ESS come from a few heavy weights. A fall to 0, drawn "
            "at 1e-9, together with the early warning is a dead policy.",
            minimum=None,
            is_logarithmic=True,
            queries=(Query(above_zero("vcpo_gradient_norm"), "before clipping"),),
        ),
    ),
)

_CONTROLLER: Final = Row(
    id=50,
    question="What did the controller do?",
    panels=(
        Panel(
            id=52,
            title="Decisions",
            text="Tightened often and never relaxed: the lag is not the cause.",
            kind=Kind.EVENTS,
            unit=AxisUnit.COUNT,
            queries=(
                Query(increase("vcpo_run_throttles_total", "direction"), "{{direction}}"),
                Query(ROLLBACKS, "rolled back"),
                Query(increase("vcpo_learner_rollbacks_refused_total"), "rollback refused"),
            ),
        ),
    ),
)

_DID_IT_HELP: Final = Row(
    id=60,
    question="Did it help?",
    panels=(
        Panel(
            id=61,
            title="Reward",
            text="A collapse is a reward that falls and does not return. The evaluation is on "
            "held-out prompts; a gap that grows is overfitting. Parts add up to the reward.",
            minimum=None,
            queries=(
                Query(value("vcpo_reward_mean"), "training"),
                Query(value("vcpo_evaluation_accuracy"), "evaluation"),
                Query(value("vcpo_reward_part", "part"), "part {{part}}"),
            ),
        ),
        Panel(
            id=62,
            title="Steps without an update",
            text="`no_gradient`: all rewards are equal. `low_ess`, "
            "`early_warning`: limits of the spec refuse them. `non_finite_*`: a number is "
            "broken.",
            unit=AxisUnit.SHARE,
            maximum=1.0,
            bands=(Band(None, Color.GOOD), Band(threshold("skippedStepsRatio"), Color.BAD)),
            queries=(Query(_SKIPPED, "{{reason}}"),),
        ),
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
