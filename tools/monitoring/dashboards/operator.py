"""The board `vcpo-operator`: is the operator up, does it keep up, and what does it cost?"""

from __future__ import annotations

from typing import Final

from tools.monitoring.dashboards.board import AxisUnit, Band, Board, Color, Kind, Panel, Query, Row
from tools.monitoring.dashboards.promql import (
    OPERATOR,
    RUNS,
    of_part,
    operator_quantile,
    operator_rate,
    operator_value,
    rate,
    selector,
    value,
)

_TOO_LONG_S: Final = 120.0
"""The liveness probe of the operator, and the alerts, act beyond this."""
_TOO_LONG: Final = (Band(None, Color.GOOD), Band(_TOO_LONG_S, Color.BAD))


_BUILD: Final = selector("vcpo_build_info", 'part="operator"', OPERATOR)


def _operators(metric: str) -> str:
    """Return a metric of the operators' processes."""
    return of_part("operator", selector(metric, scope=OPERATOR), OPERATOR)


_IS_IT_UP: Final = Row(
    id=10,
    question="Is it up and steering?",
    panels=(
        Panel(
            id=11,
            slug="up",
            title="Operators",
            question="Is there exactly one operator that acts?",
            reading="Without a leader nothing is steered; runs go on within their last limits. "
            "With two, both change every run.",
            kind=Kind.STAT,
            unit=AxisUnit.COUNT,
            bands=(Band(None, Color.BAD), Band(1.0, Color.GOOD), Band(2.0, Color.BAD)),
            queries=(
                Query(
                    f"sum(max by (instance) ({selector('vcpo_operator_leader', scope=OPERATOR)}))",
                    "leading",
                ),
            ),
        ),
        Panel(
            id=16,
            slug="version",
            title="Version",
            question="Which version of the operator runs?",
            reading="Two for long: a rollout of the Deployment that does not end.",
            kind=Kind.NAMES,
            queries=(
                Query(f"count by (version) (max by (version, instance) ({_BUILD}))", "{{version}}"),
            ),
        ),
        Panel(
            id=12,
            slug="runs",
            title="Runs",
            question="How many runs train, and why do the others not?",
            reading="By the reason of the condition Ready.",
            kind=Kind.STACK,
            unit=AxisUnit.COUNT,
            queries=(
                Query(
                    "count by (reason) ("
                    + value(
                        "vcpo_run_condition_reason",
                        "reason",
                        where='condition="Ready"',
                        scope=RUNS,
                    )
                    + " == 1)",
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            id=13,
            slug="throttle-orders",
            title="Orders to learners",
            question="Do the lag limits reach the learners?",
            reading="An order that fails is sent again; alerts compare what was ordered with what "
            "is in force.",
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(
                    "sum by (result) ("
                    + rate("vcpo_run_throttle_orders_total", "result", scope=RUNS)
                    + ")",
                    "{{result}}",
                ),
            ),
        ),
        Panel(
            id=14,
            slug="signal-requests",
            title="Requests for signals",
            question="Do learners and Prometheus answer the operator?",
            reading="`error` or `nothing` from all runs: the network, or the Prometheus. From "
            "one: its learner.",
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(
                    "sum by (source, result) ("
                    + rate("vcpo_run_signal_requests_total", "source", "result", scope=RUNS)
                    + ")",
                    "{{source}}: {{result}}",
                ),
            ),
        ),
        Panel(
            id=15,
            slug="signals-age",
            title="Oldest signals",
            question="Which runs send no signals?",
            reading="The ten runs with the oldest signals.",
            unit=AxisUnit.SECONDS,
            queries=(
                Query(
                    f"topk(10, {value('vcpo_run_signals_age_seconds', scope=RUNS)})",
                    "{{namespace}}/{{run}}",
                ),
            ),
        ),
    ),
)

_DOES_IT_KEEP_UP: Final = Row(
    id=20,
    question="Does it keep up?",
    panels=(
        Panel(
            id=21,
            slug="reconciles",
            title="Reconciles",
            question="Do reconciles succeed?",
            reading="`error` is repeated with a growing delay. `bug` is one: its log has the "
            "traceback.",
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(operator_rate("vcpo_operator_reconciles_total", "result"), "{{result}}"),
            ),
        ),
        Panel(
            id=22,
            slug="reconcile-duration",
            title="Duration of a reconcile",
            question="How long does one look at a run take?",
            reading="Calls to the API server are most of it.",
            unit=AxisUnit.SECONDS,
            queries=(
                Query(operator_quantile(0.5, "vcpo_operator_reconcile_duration_seconds"), "p50"),
                Query(operator_quantile(0.99, "vcpo_operator_reconcile_duration_seconds"), "p99"),
            ),
        ),
        Panel(
            id=23,
            slug="queue",
            title="Queue",
            question="How many runs wait for a reconcile?",
            reading="A queue that empties is healthy, however long it was.",
            unit=AxisUnit.COUNT,
            queries=(Query(operator_value("max", "vcpo_operator_queue_depth"), "runs"),),
        ),
        Panel(
            id=24,
            slug="queue-oldest",
            title="Longest wait in the queue",
            question="How long does the run wait that has waited longest?",
            reading="Beyond two minutes the liveness probe restarts the operator.",
            unit=AxisUnit.SECONDS,
            bands=_TOO_LONG,
            queries=(Query(operator_value("max", "vcpo_operator_queue_oldest_seconds"), "wait"),),
        ),
        Panel(
            id=25,
            slug="recreated",
            title="Objects created again",
            question="Does somebody else delete objects of runs?",
            reading="Another controller, a clean-up job or a person. By kind of object.",
            unit=AxisUnit.PER_SECOND,
            queries=(Query(operator_rate("vcpo_operator_recreated_total", "kind"), "{{kind}}"),),
        ),
    ),
)

_DOES_THE_API_ANSWER: Final = Row(
    id=30,
    question="Does the API server answer?",
    panels=(
        Panel(
            id=31,
            slug="api-requests",
            title="Requests to the API server",
            question="Does the API server accept what the operator asks?",
            reading="403 is a missing right, 409 a conflict that is repeated, 422 an invalid "
            "object, 429 and 0 an API server that cannot keep up.",
            kind=Kind.STACK,
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(
                    operator_rate(
                        "vcpo_operator_api_requests_total", "verb", "code", over=("resource",)
                    ),
                    "{{verb}} {{code}}",
                ),
            ),
        ),
        Panel(
            id=32,
            slug="watch-lag",
            title="Lag of the watch",
            question="Does the operator see what it wrote?",
            reading="Beyond two minutes the watch is deaf: the operator acts on an old picture.",
            unit=AxisUnit.SECONDS,
            bands=_TOO_LONG,
            queries=(Query(operator_value("max", "vcpo_operator_watch_lag_seconds"), "lag"),),
        ),
        Panel(
            id=33,
            slug="watch-events",
            title="Time since the newest event",
            question="Which resources send events?",
            reading="A quiet cluster sends none, so a long time is no fault by itself.",
            unit=AxisUnit.SECONDS,
            queries=(
                Query(
                    "time() - "
                    + operator_value(
                        "max", "vcpo_operator_watch_event_timestamp_seconds", "resource"
                    ),
                    "{{resource}}",
                ),
            ),
        ),
        Panel(
            id=34,
            slug="loop-lag",
            title="Lag of the event loop",
            question="Does something block the operator's event loop?",
            reading="Seconds: a call that blocks, or too little CPU.",
            unit=AxisUnit.SECONDS,
            queries=(Query(operator_value("max", "vcpo_operator_loop_lag_seconds"), "lag"),),
        ),
    ),
)

_WHAT_DOES_IT_COST: Final = Row(
    id=40,
    question="What does it cost?",
    panels=(
        Panel(
            id=41,
            slug="memory",
            title="Memory",
            question="How much memory does the operator use?",
            reading="It grows with the number of runs; `resources.limits` is the limit.",
            unit=AxisUnit.BYTES,
            queries=(Query(f"max({_operators('process_resident_memory_bytes')})", "resident"),),
        ),
        Panel(
            id=42,
            slug="cpu",
            title="CPU",
            question="How many cores does the operator use?",
            reading="A whole core for long: its event loop is the bottleneck.",
            queries=(
                Query(
                    "max("
                    + of_part(
                        "operator",
                        f"rate({selector('process_cpu_seconds_total', scope=OPERATOR)}"
                        "[$__rate_interval])",
                        OPERATOR,
                    )
                    + ")",
                    "cores",
                ),
            ),
        ),
        Panel(
            id=43,
            slug="series",
            title="Series",
            question="How many series do the runs keep in Prometheus?",
            reading="The ten runs with most. Each part has a bound that a test keeps; more is a "
            "pod scraped twice, or many workers.",
            unit=AxisUnit.COUNT,
            queries=(
                Query(
                    f"topk(10, count by (namespace, run) ({{__name__=~'vcpo_.+',run!='',{RUNS}}}))",
                    "{{namespace}}/{{run}}",
                ),
            ),
        ),
    ),
)

OPERATOR_BOARD: Final = Board(
    uid="vcpo-operator",
    title="VCPO / Operator",
    description="Is the operator up and steering, does it keep up, and what does it cost?",
    tags=("vcpo", "operator"),
    has_run=False,
    rows=(_IS_IT_UP, _DOES_IT_KEEP_UP, _DOES_THE_API_ANSWER, _WHAT_DOES_IT_COST),
)
