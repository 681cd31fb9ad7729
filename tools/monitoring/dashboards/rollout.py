"""The board `vcpo-rollout`: are the workers there, do they generate, and from which weights?"""

from __future__ import annotations

from typing import Final

from tools.monitoring.dashboards.board import (
    AxisUnit,
    Board,
    Kind,
    Panel,
    Query,
    Role,
    Row,
)
from tools.monitoring.dashboards.promql import (
    increase,
    of_part,
    selector,
    value,
    worker_quantile,
    worker_rates,
    worker_values,
)


def _replicas(state: str) -> str:
    """Return the workers of all groups in a state, as the host counts them."""
    each = value("vcpo_run_replicas", "group", where=f'state="{state}"')
    return f"sum by (namespace, run) ({each})"


_ARE_THEY_THERE: Final = Row(
    id=10,
    question="Are the workers there?",
    panels=(
        Panel(
            id=11,
            slug="workers",
            title="Workers",
            question="Are as many workers ready as the host wants?",
            reading="Ready below desired: pods that start, crash or find no node. Heard of below "
            "ready: workers that do not reach the learner.",
            unit=AxisUnit.COUNT,
            queries=(
                Query(_replicas("desired"), "desired", role=Role.REFERENCE),
                Query(_replicas("ready"), "ready"),
                Query(f"sum by (namespace, run) ({value('vcpo_workers', 'group')})", "heard of"),
            ),
        ),
        Panel(
            id=12,
            slug="trust",
            title="Trust",
            question="Does the learner trust its workers?",
            reading="A worker that let a lease expire is doubted until it delivers; it gets few "
            "leases.",
            kind=Kind.STACK,
            unit=AxisUnit.COUNT,
            queries=(Query(value("vcpo_workers_by_trust", "trust"), "{{trust}}"),),
        ),
        Panel(
            id=13,
            slug="process-failures",
            title="Failed workers",
            question="Did workers end or hang?",
            reading="The log of the worker that ended names the cause.",
            kind=Kind.EVENTS,
            unit=AxisUnit.COUNT,
            queries=(
                Query(
                    increase("vcpo_run_process_failures_total", "cause", where='role="rollout"'),
                    "{{cause}}",
                ),
            ),
        ),
    ),
)

_DO_THEY_GENERATE: Final = Row(
    id=20,
    question="Do they generate?",
    panels=(
        Panel(
            id=21,
            slug="tokens",
            title="Tokens of a worker",
            question="Is one worker slower than the others?",
            reading="Least, mean and most of all workers. A least far below the mean is one slow "
            "or idle machine.",
            unit=AxisUnit.TOKENS_PER_SECOND,
            queries=(
                Query(worker_rates("max", "vcpo_rollout_tokens_total"), "most"),
                Query(worker_rates("avg", "vcpo_rollout_tokens_total"), "mean"),
                Query(worker_rates("min", "vcpo_rollout_tokens_total"), "least"),
            ),
        ),
        Panel(
            id=22,
            slug="in-flight",
            title="In flight on a worker",
            question="Are all workers busy?",
            reading="0 for a worker that has no lease: admission is full, or it is not trusted.",
            unit=AxisUnit.COUNT,
            queries=(
                Query(worker_values("max", "vcpo_rollout_in_flight"), "most"),
                Query(worker_values("avg", "vcpo_rollout_in_flight"), "mean"),
                Query(worker_values("min", "vcpo_rollout_in_flight"), "least"),
            ),
        ),
        Panel(
            id=23,
            slug="lease-wait",
            title="Wait for leases",
            question="Which share of their time do workers wait for work?",
            reading="High for all: the learner is the bottleneck, and fewer workers do. High "
            "under a throttle is on purpose.",
            unit=AxisUnit.SHARE,
            maximum=1.0,
            queries=(
                Query(worker_rates("avg", "vcpo_rollout_lease_wait_seconds_total"), "mean"),
                Query(worker_rates("max", "vcpo_rollout_lease_wait_seconds_total"), "most"),
            ),
        ),
        Panel(
            id=24,
            slug="generation",
            title="Duration of a lease",
            question="How long does a worker take from a lease to its last trajectory?",
            reading="Longer than some steps of the learner: the lag of its trajectories.",
            unit=AxisUnit.SECONDS,
            queries=(
                Query(worker_quantile(0.5, "vcpo_rollout_generation_seconds"), "p50"),
                Query(worker_quantile(0.95, "vcpo_rollout_generation_seconds"), "p95"),
            ),
        ),
        Panel(
            id=25,
            slug="outcomes",
            title="Outcomes",
            question="What becomes of finished trajectories?",
            reading="`lease_ended`: the learner no longer wanted it. `released`: given back for "
            "another lease.",
            kind=Kind.STACK,
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(worker_rates("sum", "vcpo_rollout_samples_total", "outcome"), "{{outcome}}"),
            ),
        ),
        Panel(
            id=26,
            slug="failures",
            title="Failed generations",
            question="Why do generations fail?",
            reading="`prompt` and `reward` are the environment's code; `timeout` is a slow one."
            " Truncated prompts lost text and were answered.",
            kind=Kind.STACK,
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(worker_rates("sum", "vcpo_rollout_failures_total", "cause"), "{{cause}}"),
                Query(worker_rates("sum", "vcpo_rollout_truncated_total"), "truncated prompts"),
            ),
        ),
        Panel(
            id=27,
            slug="partial",
            title="Interrupted responses",
            question="Is the work of interrupted responses kept?",
            reading="Another lease resumes released tokens. A restarted response loses its own.",
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(worker_rates("sum", "vcpo_rollout_tokens_released_total"), "released tokens"),
                Query(worker_rates("sum", "vcpo_rollout_tokens_resumed_total"), "resumed tokens"),
                Query(worker_rates("sum", "vcpo_rollout_restarted_total"), "restarted responses"),
            ),
        ),
        Panel(
            id=28,
            slug="memory",
            title="Memory of a worker",
            question="Does a worker near its memory limit?",
            reading="Resident memory; a worker over its limit ends as OOMKilled.",
            unit=AxisUnit.BYTES,
            queries=(
                Query(
                    "max by (namespace, run)"
                    f" ({of_part('rollout', selector('process_resident_memory_bytes'))})",
                    "most",
                ),
            ),
        ),
    ),
)

_HOW_OLD_ARE_THE_WEIGHTS: Final = Row(
    id=30,
    question="How old are their weights?",
    panels=(
        Panel(
            id=31,
            slug="weights-age",
            title="Versions behind",
            question="How far behind the learner are the workers' weights?",
            reading="Each version behind is a step of lag from the start. A worst that rises is "
            "one worker that does not get its weights.",
            unit=AxisUnit.VERSIONS,
            queries=(
                Query(worker_values("avg", "vcpo_rollout_weights_age_versions"), "mean"),
                Query(worker_values("max", "vcpo_rollout_weights_age_versions"), "worst"),
            ),
        ),
        Panel(
            id=32,
            slug="sync-duration",
            title="Duration of an update of weights",
            question="How long does a worker take to use a new version?",
            reading="To fetch, verify and swap in. Longer than a few steps: lag that no limit "
            "removes.",
            unit=AxisUnit.SECONDS,
            queries=(
                Query(worker_quantile(0.5, "vcpo_rollout_weight_sync_duration_seconds"), "p50"),
                Query(worker_quantile(0.95, "vcpo_rollout_weight_sync_duration_seconds"), "p95"),
            ),
        ),
        Panel(
            id=33,
            slug="sync-bytes",
            title="Bytes of weights",
            question="Where do the weights come from, and how many bytes?",
            reading="Read by source, and sent by the learner. A store that workers see relieves "
            "the learner; deltas are smaller than full versions.",
            unit=AxisUnit.BYTES_PER_SECOND,
            queries=(
                Query(
                    worker_rates("sum", "vcpo_rollout_weight_sync_bytes_total", "source"),
                    "from {{source}}",
                ),
                Query(
                    worker_rates("sum", "vcpo_weights_served_bytes_total", "form"),
                    "learner, {{form}}",
                    role=Role.FAINT,
                ),
            ),
        ),
        Panel(
            id=34,
            slug="swaps",
            title="Swaps while generating",
            question="Are weights swapped in without a pause?",
            reading="A swap in flight costs no generation.",
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(
                    worker_rates("sum", "vcpo_rollout_weight_updates_in_flight_total"),
                    "swaps in flight",
                ),
            ),
        ),
    ),
)

_IS_IT_THE_ENVIRONMENT: Final = Row(
    id=40,
    question="Is it the environment?",
    panels=(
        Panel(
            id=41,
            slug="environment",
            title="Duration of calls to the environment",
            question="How long do prompts, replies and rewards take?",
            reading="A p95 near the duration of a lease: the environment is the bottleneck.",
            unit=AxisUnit.SECONDS,
            queries=(
                Query(worker_quantile(0.5, "vcpo_rollout_environment_seconds"), "p50"),
                Query(worker_quantile(0.95, "vcpo_rollout_environment_seconds"), "p95"),
            ),
        ),
        Panel(
            id=42,
            slug="environment-failures",
            title="Failed calls to the environment",
            question="Does the environment fail?",
            reading="`raised` is an exception of its code, `sandbox` a program that could not be "
            "run.",
            kind=Kind.STACK,
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(
                    worker_rates("sum", "vcpo_rollout_environment_failures_total", "kind"),
                    "{{kind}}",
                ),
            ),
        ),
        Panel(
            id=44,
            slug="hung-calls",
            title="Hung calls to the environment",
            question="Do calls stay behind that never return?",
            reading="A line that only rises: a client in the environment lacks a timeout. A worker "
            "that leaves more behind than it has threads ends, and its host starts another.",
            unit=AxisUnit.COUNT,
            queries=(Query(worker_values("max", "vcpo_rollout_environment_hung_calls"), "most"),),
        ),
    ),
)

_IS_IT_THE_ENGINE: Final = Row(
    id=50,
    question="Is it the engine?",
    panels=(
        Panel(
            id=51,
            slug="kv-cache",
            title="Cache of keys and values",
            question="Does the engine's memory limit how many responses run at once?",
            reading="Near 1 with sequences that wait: a larger `gpu_memory_utilization`, or fewer "
            "at once. vLLM only.",
            unit=AxisUnit.SHARE,
            maximum=1.0,
            queries=(
                Query(worker_values("avg", "vcpo_rollout_engine_kv_cache_used_ratio"), "mean"),
                Query(worker_values("max", "vcpo_rollout_engine_kv_cache_used_ratio"), "most"),
            ),
        ),
        Panel(
            id=52,
            slug="engine-queue",
            title="Sequences in the engine",
            question="Do sequences wait in the engine?",
            reading="Waiting sequences age before their first token. vLLM only.",
            unit=AxisUnit.COUNT,
            queries=(
                Query(worker_values("sum", "vcpo_rollout_engine_running"), "running"),
                Query(worker_values("sum", "vcpo_rollout_engine_waiting"), "waiting"),
                Query(worker_values("max", "vcpo_rollout_engine_waiting"), "waiting, worst"),
            ),
        ),
        Panel(
            id=53,
            slug="preemptions",
            title="Preemptions",
            question="Does the engine compute sequences twice?",
            reading="A preempted sequence is computed again from its prompt. vLLM only.",
            unit=AxisUnit.PER_SECOND,
            queries=(
                Query(worker_rates("sum", "vcpo_rollout_engine_preemptions_total"), "preemptions"),
            ),
        ),
        Panel(
            id=54,
            slug="prefix-cache",
            title="Prefix cache",
            question="Which share of prompt tokens is found in the prefix cache?",
            reading="Responses of one group share their prompt, so it is high. vLLM only.",
            unit=AxisUnit.SHARE,
            maximum=1.0,
            queries=(
                Query(
                    f"{worker_rates('sum', 'vcpo_rollout_engine_prefix_cache_hits_total')}"
                    " / on (namespace, run)"
                    f" {worker_rates('sum', 'vcpo_rollout_engine_prefix_cache_queries_total')}",
                    "hits",
                ),
            ),
        ),
    ),
)

ROLLOUT_FLEET: Final = Board(
    uid="vcpo-rollout",
    title="VCPO / Rollout fleet",
    description="Are the workers of this run there, do they generate, and from which weights?",
    tags=("vcpo", "rollout"),
    has_run=True,
    rows=(
        _ARE_THEY_THERE,
        _DO_THEY_GENERATE,
        _HOW_OLD_ARE_THE_WEIGHTS,
        _IS_IT_THE_ENVIRONMENT,
        _IS_IT_THE_ENGINE,
    ),
)
