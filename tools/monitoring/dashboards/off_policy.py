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
from tools.monitoring.dashboards.promql import buckets, increase, rate, value

_WARNING_BANDS: Final = (
    Band(None, Color.GOOD),
    Band(1 / 3, Color.WARNING),
    Band(2 / 3, Color.BAD),
)
_RATE_FACTORS: Final = tuple(
    f"vcpo_learning_rate_{name}_ratio" for name in ("schedule", "scale", "backoff")
)
_ON_POLICY: Final = value("vcpo_on_policy_ess_ratio")

_MAY_WE_STEP: Final = Row(
    id=10,
    question="May we step?",
    panels=(
        Panel(
            id=11,
            slug="ess",
            title="Effective sample size",
            question="Which share of a batch does its effective sample size reach?",
            reading="Of the last step, and mean and tenth percentile of recent steps. On policy it "
            "lies on the reference. Below the floor the host halves the lag.",
            maximum=1.0,
            queries=(
                Query(value("vcpo_ess_ratio"), "last", role=Role.FAINT),
                Query(value("vcpo_ess_mean_ratio"), "recent mean"),
                Query(value("vcpo_ess_low_ratio"), "low tenth"),
                Query(_ON_POLICY, "on policy", role=Role.REFERENCE),
                Query(
                    f"{value('vcpo_run_ess_floor_ratio')} * on (namespace, run) {_ON_POLICY}",
                    "floor",
                    role=Role.LIMIT,
                ),
            ),
        ),
        Panel(
            id=12,
            slug="ess-kinds",
            title="ESS before and after truncation, and of tokens",
            question="Is it the trajectories or the single tokens that are off policy?",
            reading="Long responses lower the ESS of trajectories long before that of tokens. "
            "Truncation that lifts it far hides heavy weights.",
            maximum=1.0,
            queries=(
                Query(value("vcpo_ess_ratio"), "trajectories"),
                Query(value("vcpo_truncated_ess_ratio"), "truncated"),
                Query(value("vcpo_token_ess_ratio"), "tokens"),
            ),
        ),
        Panel(
            id=13,
            slug="effective-learning-rate",
            title="Effective learning rate",
            question="Which share of the spec's learning rate is taken, and what lowers it?",
            reading="The effective rate is schedule x ESS x backoff of the spec's. ESS (or the "
            "trust region) acts step by step; a critical warning or a rollback halves the backoff.",
            maximum=1.0,
            queries=(
                Query(" * ".join(map(value, _RATE_FACTORS)), "effective"),
                *map(Query, map(value, _RATE_FACTORS), ("schedule", "ESS", "backoff")),
            ),
        ),
        Panel(
            id=14,
            slug="collapse-warning",
            title="Early warning of a collapse",
            question="Is the run about to collapse?",
            reading="1/3 warns, 2/3 is critical: in the studies a collapse followed within eleven "
            "steps in the median, and a third came without. 1 is dead: the policy stands still.",
            maximum=1.0,
            bands=_WARNING_BANDS,
            queries=(Query(value("vcpo_collapse_warning_ratio"), "warning"),),
        ),
        Panel(
            id=15,
            slug="conditions",
            title="What the host thinks",
            question="Which reasons do the conditions of the run have now?",
            reading="The same words are in `kubectl describe`, with a sentence each.",
            kind=Kind.NAMES,
            queries=(
                Query(
                    value(
                        "vcpo_run_condition_reason",
                        "condition",
                        "reason",
                        where='condition=~"Stable|EssHealthy|LearnerFed|SignalsFresh"',
                    )
                    + " == 1",
                    "{{condition}}: {{reason}}",
                ),
            ),
        ),
        Panel(
            id=16,
            slug="calibration-age",
            title="Age of the on-policy reference",
            question="How many steps ago was the on-policy ESS last measured?",
            reading="It is measured on fresh tokens. A growing age means that no fresh token "
            "arrives, and that the reference may be out of date.",
            unit=AxisUnit.STEPS,
            queries=(Query(value("vcpo_calibration_age_steps"), "age"),),
        ),
        Panel(
            id=17,
            slug="mismatch",
            title="Mismatch at equal version",
            question="Do workers and learner compute the same policy?",
            reading="Of fresh tokens, which hold no staleness; up to the limit it is rounding. The "
            "worst alone: that worker. Late tokens apart from early ones: positions or cache. One "
            "engine: its precision.",
            unit=AxisUnit.NATS,
            minimum=None,
            is_logarithmic=True,
            queries=(
                Query(value("vcpo_mismatch_nats"), "mean gap"),
                Query(value("vcpo_mismatch_p99_nats"), "99th percentile"),
                Query(value("vcpo_mismatch_divergence_nats"), "KL"),
                Query(value("vcpo_mismatch_worst_worker_nats"), "worst worker", role=Role.FAINT),
                Query(value("vcpo_mismatch_engine_nats", "engine"), "engine {{engine}}"),
                Query(value("vcpo_mismatch_position_nats", "position"), "from token {{position}}"),
                Query(value("vcpo_mismatch_limit_nats"), "limit", role=Role.LIMIT),
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
            slug="lag-heatmap",
            title="Lag of trained trajectories",
            question="How old are the oldest tokens of the trajectories that are trained?",
            reading="A band that rises is a queue that grows: generation is slow, or there are "
            "too many workers.",
            kind=Kind.HEATMAP,
            unit=AxisUnit.VERSIONS,
            queries=(Query(buckets("vcpo_policy_lag_steps"), "{{le}}"),),
        ),
        Panel(
            id=22,
            slug="lag-limits",
            title="Lag against its limits",
            question="Does the lag stay within what is admitted?",
            reading="Above the admitted lag, older trajectories are still in the buffer. Above "
            "the bound of the spec is a bug.",
            unit=AxisUnit.VERSIONS,
            queries=(
                Query(value("vcpo_token_lag_max_steps"), "oldest token"),
                Query(value("vcpo_token_lag_median_steps"), "median token"),
                Query(value("vcpo_admission_lag_steps"), "admitted", role=Role.REFERENCE),
                Query(value("vcpo_run_max_policy_lag_steps"), "bound", role=Role.LIMIT),
            ),
        ),
        Panel(
            id=23,
            slug="ess-by-lag",
            title="ESS by lag",
            question="Is it the old trajectories that lower the ESS?",
            reading="Lines apart: yes, and a lower lag helps. Lines together: no; compare the "
            "numerics of rollout workers and learner.",
            maximum=1.0,
            queries=(Query(value("vcpo_lag_ess_ratio", "lag"), "{{lag}} or more"),),
        ),
        Panel(
            id=24,
            slug="divergence",
            title="Divergence of the policies",
            question="How far has the target policy moved from the behavior policy?",
            reading="KL divergence per token. It rises with the learning rate and with the lag.",
            unit=AxisUnit.NATS,
            minimum=None,
            is_logarithmic=True,
            queries=(Query(value("vcpo_divergence_nats"), "KL per token"),),
        ),
        Panel(
            id=25,
            slug="backlog",
            title="Work outstanding",
            question="How many trajectories wait between a lease and its update?",
            reading="Admission keeps their sum below the limit. A full buffer makes data old; an "
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
            slug="weight-heatmap",
            title="Importance weights",
            question="How are the log importance weights of trajectories spread?",
            reading="A narrow band around 0 is on policy. A long upper tail is a few trajectories "
            "that make the update.",
            kind=Kind.HEATMAP,
            unit=AxisUnit.NATS,
            minimum=None,
            queries=(Query(buckets("vcpo_log_importance_weight_nats"), "{{le}}"),),
        ),
        Panel(
            id=32,
            slug="largest-weight",
            title="Largest importance weight",
            question="How heavy is the heaviest trajectory before truncation?",
            reading="Weights are truncated at the cap of the spec, 8 unless set.",
            minimum=None,
            is_logarithmic=True,
            queries=(Query(value("vcpo_importance_weight_max"), "largest weight"),),
        ),
        Panel(
            id=33,
            slug="concentration",
            title="Share of the few",
            question="Do a few trajectories make the whole update?",
            reading="The heaviest trajectory's share of all weights, and the share of the gradient "
            "norm that the top 1 % of trajectories have.",
            unit=AxisUnit.SHARE,
            maximum=1.0,
            queries=(
                Query(value("vcpo_weight_concentration_ratio"), "heaviest weight"),
                Query(value("vcpo_top_gradient_ratio"), "top 1 % of gradients"),
            ),
        ),
        Panel(
            id=34,
            slug="gradient-norm",
            title="Gradient norm",
            question="Is the gradient of an ordinary size?",
            reading="Spikes together with a low ESS come from a few heavy weights. A fall to 0 "
            "together with the early warning is a dead policy.",
            minimum=None,
            is_logarithmic=True,
            queries=(Query(value("vcpo_gradient_norm"), "before clipping"),),
        ),
        Panel(
            id=35,
            slug="masked-tokens",
            title="Masked tokens",
            question="Which share of the tokens does the method give no gradient?",
            reading="Clipping and masks grow with the divergence; VCPO itself masks no token.",
            unit=AxisUnit.SHARE,
            maximum=1.0,
            queries=(Query(value("vcpo_masked_tokens_ratio"), "masked"),),
        ),
    ),
)

_BASELINE: Final = Row(
    id=40,
    question="Is the baseline at work?",
    panels=(
        Panel(
            id=41,
            slug="baseline-shift",
            title="Baseline shift",
            question="How far is the baseline from the plain mean reward of its group?",
            reading="0 on policy with equal gradients. It moves away as weights and gradients "
            "become unequal.",
            minimum=None,
            queries=(Query(value("vcpo_baseline_shift"), "shift"),),
        ),
        Panel(
            id=42,
            slug="baseline-concentration",
            title="Concentration of the baseline",
            question="Does one trajectory set the baseline of its group?",
            reading="The largest weight of OPOB over their sum. Near 1, the baseline is the reward "
            "of one trajectory.",
            unit=AxisUnit.SHARE,
            maximum=1.0,
            queries=(Query(value("vcpo_baseline_weight_concentration_ratio"), "largest weight"),),
        ),
    ),
)

_CONTROLLER: Final = Row(
    id=50,
    question="What did the controller do?",
    panels=(
        Panel(
            id=51,
            slug="admission",
            title="Lag limit",
            question="How far is the lag limit throttled?",
            reading="Ordered by the host, in force in the learner. Apart for long: orders do not "
            "arrive. Both below the bound: the run is throttled.",
            unit=AxisUnit.VERSIONS,
            queries=(
                Query(value("vcpo_run_admission_lag_steps"), "ordered"),
                Query(value("vcpo_admission_lag_steps"), "in force"),
                Query(value("vcpo_run_max_policy_lag_steps"), "bound", role=Role.LIMIT),
            ),
        ),
        Panel(
            id=52,
            slug="throttles",
            title="Throttles",
            question="When was the limit tightened, and when relaxed?",
            reading="Tightened often and never relaxed: the lag is not the cause.",
            kind=Kind.EVENTS,
            unit=AxisUnit.COUNT,
            queries=(Query(increase("vcpo_run_throttles_total", "direction"), "{{direction}}"),),
        ),
        Panel(
            id=53,
            slug="decisions",
            title="Decisions about workers",
            question="Why were workers added, removed or kept?",
            reading="Changes of the decision, by direction and reason.",
            kind=Kind.EVENTS,
            unit=AxisUnit.COUNT,
            queries=(
                Query(
                    increase("vcpo_run_decisions_total", "direction", "reason"),
                    "{{direction}}: {{reason}}",
                ),
            ),
        ),
        Panel(
            id=54,
            slug="signals-age",
            title="Age of the signals",
            question="How old are the numbers that the host decides by?",
            reading="Beyond `control.signalsMaxAgeSeconds` nothing is steered: limits and replicas "
            "stay as they are.",
            unit=AxisUnit.SECONDS,
            queries=(Query(value("vcpo_run_signals_age_seconds"), "age"),),
        ),
    ),
)

_DID_IT_HELP: Final = Row(
    id=60,
    question="Did it help?",
    panels=(
        Panel(
            id=61,
            slug="reward",
            title="Reward",
            question="Does the run still learn?",
            reading="A collapse is a reward that falls and does not return. The evaluation is on "
            "held-out prompts.",
            minimum=None,
            queries=(
                Query(value("vcpo_reward_mean"), "training"),
                Query(value("vcpo_evaluation_accuracy"), "evaluation"),
            ),
        ),
        Panel(
            id=62,
            slug="skipped",
            title="Steps without an update",
            question="Which steps were skipped, and why, and was the run rolled back?",
            reading="`no_gradient`: all rewards are equal. `low_ess`, `high_divergence`, "
            "`early_warning`: limits of the spec refuse them. `non_finite_*`: a number is broken.",
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(rate("vcpo_learner_skipped_steps_total", "reason"), "{{reason}}"),
                Query(rate("vcpo_learner_steps_total"), "all steps", role=Role.REFERENCE),
                Query(value("vcpo_learner_rollbacks"), "rollbacks so far"),
            ),
        ),
    ),
)

OFF_POLICY: Final = Board(
    uid="vcpo-off-policy",
    title="VCPO / Off-policy health",
    description="Is the data of this run too old for its updates, why, and what was done about it?",
    tags=("vcpo", "off-policy"),
    has_run=True,
    rows=(
        _MAY_WE_STEP,
        _WHY_OFF_POLICY,
        _WHO_MAKES_THE_UPDATE,
        _BASELINE,
        _CONTROLLER,
        _DID_IT_HELP,
    ),
)
