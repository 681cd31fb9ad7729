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
    increase,
    of_part,
    quantile,
    rate,
    selector,
    share,
    value,
    worker_mean,
    worker_rates,
)

HOW_FAST: Final = Row(
    id=30,
    question="How fast is it, and where does the time go?",
    panels=(
        Panel(
            id=31,
            slug="step-age",
            title="Time since the last step",
            question="Does the learner still take steps?",
            reading="A saw-tooth as high as a step is long. A line that only rises is a learner "
            "that hangs, or waits for data: see its stages.",
            unit=AxisUnit.SECONDS,
            queries=(
                Query(f"time() - {value('vcpo_learner_step_timestamp_seconds')}", "last step"),
                Query(
                    quantile(0.95, "vcpo_learner_step_duration_seconds"),
                    "p95 of a step",
                    role=Role.REFERENCE,
                ),
            ),
        ),
        Panel(
            id=32,
            slug="throughput",
            title="Tokens",
            question="Do workers sample what the learner trains?",
            reading="Sampled above trained for long: responses are dropped. Equal: balanced.",
            unit=AxisUnit.TOKENS_PER_SECOND,
            queries=(
                Query(rate("vcpo_learner_tokens_total"), "trained"),
                Query(worker_rates("sum", "vcpo_rollout_tokens_total"), "sampled"),
            ),
        ),
        Panel(
            id=33,
            slug="stages",
            title="Where the learner's time goes",
            question="What does the learner do all the time?",
            reading="Shares of a second. `wait` asks for more workers, `publish` for faster "
            "storage or network, the rest for a faster device.",
            kind=Kind.STACK,
            unit=AxisUnit.SHARE,
            queries=(Query(rate("vcpo_learner_stage_seconds_total", "stage"), "{{stage}}"),),
        ),
        Panel(
            id=34,
            slug="step-duration",
            title="Duration of a step",
            question="How long does an update take, without the wait for its batch?",
            reading="A p95 far above the median: some steps are long, by checkpoints or length.",
            unit=AxisUnit.SECONDS,
            queries=(
                Query(quantile(0.5, "vcpo_learner_step_duration_seconds"), "p50"),
                Query(quantile(0.95, "vcpo_learner_step_duration_seconds"), "p95"),
            ),
        ),
        Panel(
            id=35,
            slug="idle",
            title="Idle learner",
            question="Which share of its time does the learner wait for data?",
            reading="Above one half for long, with every worker busy: raise `maxReplicas`.",
            unit=AxisUnit.SHARE,
            maximum=1.0,
            queries=(Query(value("vcpo_learner_idle_ratio"), "waiting"),),
        ),
        Panel(
            id=36,
            slug="steps",
            title="Steps",
            question="How many steps does the run take a minute?",
            reading="Steps that make no update are counted; the off-policy board tells why.",
            unit=AxisUnit.STEPS_PER_MINUTE,
            queries=(Query(f"{rate('vcpo_learner_steps_total')} * 60", "steps"),),
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
            question="Which share of the leased trajectories is never trained on, and why?",
            reading="`surplus` is resumed by the next lease. `throttled` follows a throttle. "
            "Others are wasted work.",
            kind=Kind.STACK,
            unit=AxisUnit.SHARE,
            queries=(
                Query(
                    share(
                        "vcpo_trajectories_dropped_total",
                        "reason",
                        rate("vcpo_trajectories_leased_total"),
                    ),
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            id=42,
            slug="wasted-tokens",
            title="Wasted tokens",
            question="How many sampled tokens are thrown away, and why?",
            reading="Tokens that reached the learner and were not trained on.",
            kind=Kind.STACK,
            unit=AxisUnit.TOKENS_PER_SECOND,
            queries=(Query(rate("vcpo_tokens_wasted_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            id=43,
            slug="in-a-row",
            title="Failures in a row",
            question="Did everything fail lately?",
            reading="Generations since the last accepted one, and steps since the last update. "
            "`failurePolicy` stops the run at its limits.",
            unit=AxisUnit.COUNT,
            queries=(
                Query(value("vcpo_failures_in_a_row"), "generations"),
                Query(value("vcpo_skipped_steps_in_a_row"), "steps without an update"),
            ),
        ),
        Panel(
            id=44,
            slug="accounting",
            title="Accounting errors",
            question="Is every leased trajectory accounted for?",
            reading="Leased = in flight + buffered + consumed + dropped. Above 0 is a bug: keep "
            "the run directory and report it.",
            kind=Kind.STAT,
            unit=AxisUnit.COUNT,
            bands=(Band(None, Color.GOOD), Band(1.0, Color.BAD)),
            queries=(Query(value("vcpo_accounting_errors_total"), "errors"),),
        ),
        Panel(
            id=45,
            slug="set-aside",
            title="Workers set aside",
            question="Which workers did the learner take out of the run?",
            reading="Each failed, or sampled another policy, where others did not. The event "
            "`WorkerSetAside` names it; its host replaces it.",
            kind=Kind.EVENTS,
            unit=AxisUnit.COUNT,
            queries=(Query(increase("vcpo_workers_set_aside_total", "cause"), "{{cause}}"),),
        ),
    ),
)

AFTER_A_CRASH: Final = Row(
    id=50,
    question="What would a crash cost?",
    panels=(
        Panel(
            id=51,
            slug="checkpoint-age",
            title="Age of checkpoint and evaluation",
            question="How much work would be repeated after a crash?",
            reading="A saw-tooth as high as the interval between checkpoints.",
            unit=AxisUnit.SECONDS,
            queries=(
                Query(
                    f"time() - {value('vcpo_learner_checkpoint_timestamp_seconds')}", "checkpoint"
                ),
                Query(f"time() - {value('vcpo_evaluation_timestamp_seconds')}", "evaluation"),
            ),
        ),
        Panel(
            id=52,
            slug="restarts",
            title="Restarts and failed processes",
            question="Which processes of the run ended or hung?",
            reading="`kubectl logs --previous`, or the run's events, name the cause.",
            kind=Kind.EVENTS,
            unit=AxisUnit.COUNT,
            queries=(
                Query(increase("vcpo_run_learner_restarts_total"), "learner restarted"),
                Query(
                    increase("vcpo_run_process_failures_total", "role", "cause"),
                    "{{role}} {{cause}}",
                ),
            ),
        ),
        Panel(
            id=53,
            slug="refusals",
            title="Refused calls, full disks, lost records",
            question="Does the learner refuse calls, fail to write, or lack what it wrote?",
            reading="`key`: a process with another key. `role`, `identity`: one that acts for "
            "another. `stalled`: a worker that reads too slowly. A full disk keeps the last "
            "checkpoint. Changes that a start did not find in the redo log are trained anew.",
            kind=Kind.EVENTS,
            unit=AxisUnit.COUNT,
            queries=(
                Query(increase("vcpo_learner_calls_refused_total", "reason"), "{{reason}}"),
                Query(increase("vcpo_learner_disk_full_total"), "disk full"),
                Query(value("vcpo_learner_lost_changes"), "changes lost in the redo log"),
                Query(increase("vcpo_sink_dropped_total", "sink"), "dropped by {{sink}}"),
            ),
        ),
        Panel(
            id=54,
            slug="memory",
            title="Memory of the learner",
            question="How near is the learner to its memory limits?",
            reading="Reserved memory that grows step by step is fragmentation, resident memory "
            "that grows a leak.",
            unit=AxisUnit.BYTES,
            queries=(
                Query(
                    "max by (namespace, run)"
                    f" ({of_part('learner', selector('process_resident_memory_bytes'))})",
                    "resident",
                ),
                Query(value("vcpo_learner_device_memory_bytes", "state"), "GPU, {{state}}"),
            ),
        ),
        Panel(
            id=55,
            slug="calls",
            title="Calls",
            question="Are the calls of the workers answered?",
            reading="By status code of gRPC, of the learner. Codes other than OK that "
            "last ask for a look at the logs.",
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(
                    worker_rates("sum", "vcpo_rpc_requests_total", "code", over=("method",)),
                    "{{code}}",
                ),
            ),
        ),
        Panel(
            id=56,
            slug="call-duration",
            title="Duration of calls",
            question="Which calls are slow?",
            reading="Mean by method. `Lease`, `Recall` and `GetManifest` wait until there is "
            "something to say.",
            unit=AxisUnit.SECONDS,
            queries=(Query(worker_mean("vcpo_rpc_duration_seconds", "method"), "{{method}}"),),
        ),
    ),
)
