"""The board `vcpo-operator`: is the operator up, and does it keep up?"""

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
    OPERATOR,
    RUNS,
    operator_quantile,
    operator_rate,
    operator_value,
    selector,
    value,
)
from tools.monitoring.rules import threshold

_DELAYS: Final = (
    Band(None, Color.GOOD),
    *(
        Band(each, Color.BAD)
        for each in sorted({threshold("queueOldestSeconds"), threshold("watchLagSeconds")})
    ),
)
"""The alerts act beyond these, and so does the liveness probe of the operator."""


_API_REQUESTS: Final = operator_rate(
    "vcpo_operator_api_requests_total", "verb", "code", over=("resource",)
)

_IS_IT_UP: Final = row(
    10,
    "Is it up and steering?",
    panel(
        11,
        "Operators",
        "Without one nothing is steered; runs go on within their last limits. With two, both "
        "change every run.",
        Query(
            "count(max by (instance) ("
            + selector("vcpo_build_info", 'part="operator"', scope=OPERATOR)
            + "))",
            "operators",
        ),
        kind=Kind.STAT,
        unit=AxisUnit.COUNT,
        bands=(Band(None, Color.BAD), Band(1.0, Color.GOOD), Band(2.0, Color.BAD)),
    ),
    panel(
        12,
        "Runs",
        "By the reason of the condition Ready.",
        Query(
            "count by (reason) ("
            + value("vcpo_run_condition_reason", "reason", where='condition="Ready"', scope=RUNS)
            + " == 1)",
            "{{reason}}",
        ),
        kind=Kind.STACK,
        unit=AxisUnit.COUNT,
    ),
    panel(
        15,
        "Oldest signals",
        "The ten runs with the oldest signals.",
        Query(
            f"topk(10, {value('vcpo_run_signals_age_seconds', scope=RUNS)})",
            "{{namespace}}/{{run}}",
        ),
        unit=AxisUnit.SECONDS,
    ),
)

_DOES_IT_KEEP_UP: Final = row(
    20,
    "Does it keep up?",
    panel(
        21,
        "Reconciles",
        "`error` is repeated with a growing delay. `bug` is one: its log has the traceback. Of "
        "the API: 403 is a missing right, 409 a conflict that is repeated, 422 an invalid object, "
        "429 and 0 a server that cannot keep up.",
        Query(operator_rate("vcpo_operator_reconciles_total", "result"), "{{result}}"),
        Query(
            f"{threshold('reconcileErrorsRatio'):g}"
            f" * {operator_rate('vcpo_operator_reconciles_total', over=('result',))}",
            "alert: errors",
            role=Role.LIMIT,
        ),
        Query(_API_REQUESTS, "API: {{verb}} {{code}}", role=Role.FAINT),
        unit=AxisUnit.PER_SECOND,
    ),
    panel(
        24,
        "Delays",
        "Beyond two minutes of wait the liveness probe restarts the operator; a watch that lags "
        "as long is deaf: it acts on an old picture.",
        Query(
            operator_value("max", "vcpo_operator_queue_oldest_seconds"), "longest wait in the queue"
        ),
        Query(operator_value("max", "vcpo_operator_watch_lag_seconds"), "watch"),
        Query(
            operator_quantile(0.99, "vcpo_operator_reconcile_duration_seconds"), "reconcile, p99"
        ),
        unit=AxisUnit.SECONDS,
        bands=_DELAYS,
    ),
)

OPERATOR_BOARD: Final = Board(
    uid="vcpo-operator",
    title="VCPO / Operator",
    description="Is the operator up and steering, and does it keep up?",
    tags=("vcpo", "operator"),
    has_run=False,
    rows=(_IS_IT_UP, _DOES_IT_KEEP_UP),
)
