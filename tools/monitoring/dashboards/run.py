"""The board `vcpo-run`: does a run learn, how fast, what is lost, and what would a crash cost?"""

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
    Words,
)
from tools.monitoring.dashboards.promql import (
    RUNS,
    buckets,
    effective_rate,
    quantile,
    selector,
    value,
)
from tools.monitoring.dashboards.run_work import AFTER_A_CRASH, HOW_FAST, WHAT_IS_LOST
from tools.monitoring.rules import limit, threshold

_LOW_BACKOFF: Final = limit("VCPOLearningRateBackedOff", "vcpo_learning_rate_backoff_ratio")
_STEP: Final = value("vcpo_learner_step", scope=RUNS)
_LIFECYCLE: Final = 'condition=~"Complete|Failed|Suspended"'
_WANTED: Final = value("vcpo_run_replicas", "group", where='state="desired"', scope=RUNS)
_READY: Final = Words(
    "ready", {"Training": Color.GOOD, "Complete|Succeeded": Color.NEUTRAL, ".*": Color.WARNING}
)
_STABLE: Final = Words("stable", {"Critical|Dead": Color.BAD, ".*": Color.GOOD})
_ENVIRONMENT: Final = (
    f"max by (namespace, run, environment) ({selector('vcpo_run_info', scope=RUNS)})"
)
_HEALTH: Final = 'condition!~"Complete|Failed|Suspended"'


def _reason(condition: str, column: str) -> str:
    """Return a series per run whose label `column` is the reason of a condition."""
    series = selector("vcpo_run_condition_reason", f'condition="{condition}"', RUNS)
    renamed = f'label_replace({series} == 1, "{column}", "$1", "reason", "(.+)")'
    return f"max by (namespace, run, {column}) ({renamed})"


def _condition(status: str, matcher: str, state: int) -> str:
    """Return the conditions that have a status, as a number of `board.STATES`."""
    series = selector("vcpo_run_condition", f'{matcher},status="{status}"')
    return f"({series} == 1) * {state}"


_CONDITIONS: Final = " or ".join(
    (
        _condition("True", _HEALTH, 1),
        _condition("False", _HEALTH, 0),
        _condition("Unknown", _HEALTH, 2),
        _condition("True", _LIFECYCLE, 3),
    )
)

_WHICH_RUN: Final = Row(
    id=10,
    question="Which run needs me?",
    panels=(
        Panel(
            id=11,
            slug="runs",
            title="Runs",
            question="How is each run of the chosen namespaces?",
            reading="A run that trains has the reason Training. ESS is that of recent steps over "
            "that on policy, the rate the share of the spec's that is taken; the checkpoint is the "
            "newest one's age. A run has one environment, and its reward is of that one. A run "
            "without numbers sends no metrics. A name leads to its board.",
            kind=Kind.TABLE,
            queries=(
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
                Query(
                    f"sum by (namespace, run) ({value('vcpo_workers', 'group', scope=RUNS)})",
                    "workers",
                ),
                Query(f"sum by (namespace, run) ({_WANTED})", "wanted"),
                Query(
                    f"time() - {value('vcpo_learner_checkpoint_timestamp_seconds', scope=RUNS)}",
                    "checkpoint",
                    unit=AxisUnit.SECONDS,
                ),
                Query(value("vcpo_run_learner_restarts_total", scope=RUNS), "restarts"),
            ),
        ),
        Panel(
            id=12,
            slug="conditions",
            title="Conditions",
            question="What was wrong with the run, and when?",
            reading="Green is good. Blue marks a run that is complete, failed or suspended.",
            kind=Kind.STATES,
            queries=(
                Query(
                    f"max by (namespace, run, condition) ({_CONDITIONS})",
                    "{{condition}}",
                ),
            ),
        ),
    ),
)

_DOES_IT_LEARN: Final = Row(
    id=20,
    question="Does it learn?",
    panels=(
        Panel(
            id=22,
            slug="reward-heatmap",
            title="Rewards of trajectories",
            question="How are the rewards spread?",
            reading="Two bands are solved and unsolved prompts. One band has nothing to teach.",
            kind=Kind.HEATMAP,
            queries=(Query(buckets("vcpo_reward"), "{{le}}"),),
        ),
        Panel(
            id=23,
            slug="groups",
            title="Prompts that teach nothing",
            question="Which share of groups has equal rewards only, and of responses is cut?",
            reading="A group of equal rewards has no gradient. If most are, prompts are too hard "
            "or too easy, or the reward does not tell responses apart; it alerts unless the "
            "reward is at its maximum. Cut responses that grow ask for a larger "
            "`sampling.maxNewTokens`.",
            unit=AxisUnit.SHARE,
            maximum=1.0,
            queries=(
                Query(value("vcpo_equal_groups_ratio"), "groups of equal rewards"),
                Query(value("vcpo_cut_responses_ratio"), "cut responses"),
                Query(f"{threshold('equalRewardGroupsRatio'):g}", "alert", role=Role.LIMIT),
            ),
        ),
        Panel(
            id=25,
            slug="response-length",
            title="Length of responses",
            question="How long are the responses?",
            reading="A longest twentieth at `sampling.maxNewTokens` is responses that are cut. A "
            "fall of all three to a few tokens is a policy that gives up.",
            unit=AxisUnit.TOKENS,
            queries=(
                Query(quantile(0.95, "vcpo_response_tokens"), "p95"),
                Query(quantile(0.5, "vcpo_response_tokens"), "median"),
                Query(quantile(0.05, "vcpo_response_tokens"), "p5"),
            ),
        ),
    ),
)

RUN_OVERVIEW: Final = Board(
    uid="vcpo-run",
    title="VCPO / Run overview",
    description="Does this run learn, how fast, what is lost, and what would a crash cost?",
    tags=("vcpo", "run"),
    has_run=True,
    rows=(_WHICH_RUN, _DOES_IT_LEARN, HOW_FAST, WHAT_IS_LOST, AFTER_A_CRASH),
)
