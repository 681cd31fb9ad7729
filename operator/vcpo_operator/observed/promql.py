"""A run's signals from a Prometheus: the query, and the parsing of its answer. Pure.

One instant query asks for a window of time, so the answer holds the samples as they were scraped,
with their times:

    {__name__=~"vcpo_policy_version|...", namespace="ml", run="demo"}[5m]

The signals are those of the learner's newest scrape. A series that this scrape lacks is unknown,
even if an earlier scrape had it. So one record never mixes two moments, or two learners. Means over
steps (mean and low ESS) are the learner's own gauges: means over scrapes would count a long step
more often than a short one.

They lack: rates of trajectories and tokens, which decide nothing; why steps are skipped and
generations fail; workers whose series have no label `pod` (the PodMonitors of the chart and of runs
add it).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, ValidationError

from vcpo.algo.health.early_warning import warning_level
from vcpo.control.signals import RunSignals, WorkerSignals
from vcpo.judgement import no_update_notice
from vcpo.wire.phase import RunPhase
from vcpo_operator.names import RunKey

WINDOW: Final = "5m"
"""How old a scrape may be; Prometheus itself looks back as far for an instant query."""

_CLOCK_TOLERANCE_S = 5.0
_WHY_SKIPPED = "the learner's log says why"
_LARGEST_COUNT = 2.0**53
"""A float holds every whole number up to this one."""

_ESS: Final = "vcpo_ess_ratio"
_ON_POLICY_ESS: Final = "vcpo_on_policy_ess_ratio"
_LEARNING_RATE: Final = "vcpo_learning_rate"
_RATE_SCHEDULE: Final = "vcpo_learning_rate_schedule_ratio"
_RATE_SCALE: Final = "vcpo_learning_rate_scale_ratio"
_RATE_BACKOFF: Final = "vcpo_learning_rate_backoff_ratio"
_REWARD: Final = "vcpo_reward_mean"
_WARNING: Final = "vcpo_collapse_warning_ratio"

_OF_LEARNER: Final = (
    "vcpo_learner_phase",
    "vcpo_learner_step",
    "vcpo_policy_version",
    _ESS,
    "vcpo_ess_mean_ratio",
    "vcpo_ess_low_ratio",
    _ON_POLICY_ESS,
    _LEARNING_RATE,
    _RATE_SCHEDULE,
    _RATE_SCALE,
    _RATE_BACKOFF,
    _REWARD,
    _WARNING,
    "vcpo_token_lag_median_steps",
    "vcpo_token_lag_max_steps",
    "vcpo_trajectories_buffered",
    "vcpo_trajectories_in_flight",
    "vcpo_batch_trajectories",
    "vcpo_admission_lag_steps",
    "vcpo_learner_idle_ratio",
    "vcpo_workers",
    "vcpo_evaluation_accuracy",
    "vcpo_skipped_steps_in_a_row",
    "vcpo_failures_in_a_row",
    "vcpo_learner_lost_changes",
)
_LEARNER_NAMES = frozenset(_OF_LEARNER)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatedSignals:
    """Signals, and when Prometheus scraped them."""

    signals: RunSignals
    """The signals, with an age of 0 at `scraped_s`."""
    scraped_s: float
    """Unix time, by the clock of Prometheus."""

    def at(self, now_s: float, *, is_fresh: bool) -> RunSignals:
        """Return the signals with their age at a Unix time."""
        aged = self.signals.at_age(max(0.0, now_s - self.scraped_s))
        return replace(aged, is_fresh=is_fresh)


def run_query(key: RunKey) -> str:
    """Return the query for all series of a run's signals."""
    names = "|".join((*_OF_LEARNER, "vcpo_rollout_in_flight"))
    matchers = (
        f'__name__=~"{names}"',
        f"namespace={_promql_string(key.namespace)}",
        f"run={_promql_string(key.name)}",
    )
    return f"{{{','.join(matchers)}}}[{WINDOW}]"


def parse_answer(answer: bytes, *, now_s: float) -> DatedSignals | None:
    """Parse the answer to `run_query`; None when it has no sample of the run.

    Raises: ValueError when the answer cannot be parsed, lacks or repeats a series that signals
        need, or holds a value out of its range; and when a sample is in the future.
    """
    samples = _samples(answer)
    of_learner = [sample for sample in samples if sample.name in _LEARNER_NAMES]
    if not of_learner:
        return None
    scraped_s = max(sample.time_s for sample in of_learner)
    if scraped_s - now_s > _CLOCK_TOLERANCE_S:
        raise ValueError(
            f"the newest sample is {scraped_s - now_s:.0f} s in the future;"
            " synchronize the clocks of the operator's node and of Prometheus"
        )
    scrape = _Scrape(tuple(sample for sample in of_learner if sample.time_s == scraped_s))
    return DatedSignals(signals=_signals(scrape, _workers(samples, now_s)), scraped_s=scraped_s)


def _signals(scrape: _Scrape, workers: Mapping[str, WorkerSignals]) -> RunSignals:
    on_policy, score = scrape.value(_ON_POLICY_ESS), scrape.value(_WARNING)
    groups = scrape.values("vcpo_workers", "group")
    phase, step = scrape.phase(), scrape.count("vcpo_learner_step")
    skipped = scrape.count_or_none("vcpo_skipped_steps_in_a_row") or 0
    has_never_updated = phase is RunPhase.COMPLETE and 0 < step <= skipped
    return RunSignals(
        phase=phase,
        step=step,
        policy_version=scrape.count("vcpo_policy_version"),
        # A step whose weights have no value reports 0, which no batch can have.
        ess_ratio=scrape.value(_ESS) or None,
        ess_ratio_mean=scrape.value("vcpo_ess_mean_ratio"),
        ess_ratio_low=scrape.value("vcpo_ess_low_ratio"),
        # What the learner says over gRPC before its first step.
        on_policy_ess_ratio=1.0 if on_policy is None else on_policy,
        learning_rate=scrape.value(_LEARNING_RATE),
        learning_rate_schedule=scrape.value(_RATE_SCHEDULE),
        learning_rate_scale=scrape.value(_RATE_SCALE),
        learning_rate_backoff=scrape.value(_RATE_BACKOFF),
        warning_score=score,
        warning_level=None if score is None else warning_level(score),
        reward_mean=scrape.value(_REWARD),
        accuracy=scrape.value("vcpo_evaluation_accuracy"),
        lag_p50=scrape.count_or_none("vcpo_token_lag_median_steps"),
        lag_max=scrape.count_or_none("vcpo_token_lag_max_steps"),
        lag_limit_steps=scrape.count("vcpo_admission_lag_steps"),
        buffered=scrape.count("vcpo_trajectories_buffered"),
        in_flight=scrape.count("vcpo_trajectories_in_flight"),
        batch_trajectories=scrape.count("vcpo_batch_trajectories"),
        learner_idle_ratio=scrape.required_value("vcpo_learner_idle_ratio"),
        ready_workers={group: _whole("vcpo_workers", each) for group, each in groups.items()},
        workers=workers,
        failures_in_a_row=scrape.count_or_none("vcpo_failures_in_a_row") or 0,
        no_update=no_update_notice(skipped, _WHY_SKIPPED, is_all=has_never_updated),
        has_never_updated=has_never_updated,
        lost_changes=scrape.count_or_none("vcpo_learner_lost_changes") or 0,
    )


def _workers(samples: Sequence[_Sample], now_s: float) -> dict[str, WorkerSignals]:
    """Return the workers by pod, each from its own newest scrape."""
    newest: dict[str, _Sample] = {}
    for sample in samples:
        pod = sample.labels.get("pod")
        if sample.name != "vcpo_rollout_in_flight" or not pod:
            continue
        if pod not in newest or sample.time_s > newest[pod].time_s:
            newest[pod] = sample
    return {
        pod: WorkerSignals(
            in_flight=_whole(sample.name, sample.value), silent_s=max(0.0, now_s - sample.time_s)
        )
        for pod, sample in newest.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """The newest sample of a series."""

    name: str
    labels: Mapping[str, str]
    time_s: float
    value: float


@dataclass(frozen=True, slots=True)
class _Scrape:
    """The samples of one scrape of a learner."""

    samples: Sequence[_Sample]

    def values(self, metric: str, label: str) -> dict[str, float]:
        """Return the values of a metric by one of its labels, `""` where it has none.

        Raises: ValueError when two series have the same label.
        """
        found: dict[str, float] = {}
        for sample in self.samples:
            if sample.name != metric:
                continue
            word = sample.labels.get(label, "")
            if word in found:
                raise ValueError(
                    f"two series of {metric} belong to the run; keep one scrape target"
                )
            found[word] = sample.value
        return found

    def phase(self) -> RunPhase:
        """Return the phase whose series is 1; an unknown phase counts as running.

        Raises: ValueError when no series is 1, or several are.
        """
        phases = self.values("vcpo_learner_phase", "phase")
        current = [phase for phase, value in phases.items() if value == 1.0]
        if len(current) != 1:
            name = "vcpo_learner_phase"
            raise ValueError(f"{name} must be 1 for one phase, not {current}")
        known = {phase.value: phase for phase in RunPhase}
        return known.get(current[0], RunPhase.RUNNING)

    def value(self, metric: str) -> float | None:
        """Return the value of a metric without labels; None when the scrape lacks it."""
        return self.values(metric, "").get("")

    def required_value(self, metric: str) -> float:
        """Return the value of a metric that signals need.

        Raises: ValueError when the scrape lacks it.
        """
        value = self.value(metric)
        if value is None:
            raise ValueError(f"the newest scrape lacks {metric}; is the learner's image older?")
        return value

    def count(self, metric: str) -> int:
        """Return a whole number that signals need.

        Raises: ValueError when the scrape lacks it, or it is no whole number.
        """
        return _whole(metric, self.required_value(metric))

    def count_or_none(self, metric: str) -> int | None:
        """Return a whole number; None while the learner has not measured it."""
        value = self.value(metric)
        return None if value is None else _whole(metric, value)


def _whole(name: str, value: float) -> int:
    if not (0.0 <= value <= _LARGEST_COUNT and value.is_integer()):
        raise ValueError(f"{name} must be a whole number of at least 0, not {value}")
    return int(value)


class _Series(BaseModel):
    metric: dict[str, str]
    values: list[tuple[Annotated[float, Field(allow_inf_nan=False)], float]] = []


class _Matrix(BaseModel):
    resultType: Literal["matrix"]  # noqa: N815 - Prometheus' word
    result: list[_Series]


class _Answer(BaseModel):
    """Source: https://prometheus.io/docs/prometheus/latest/querying/api, range vectors."""

    status: Literal["success"]
    data: _Matrix


def _samples(answer: bytes) -> list[_Sample]:
    try:
        series = _Answer.model_validate_json(answer).data.result
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise ValueError(
            f"not an answer of Prometheus' query API: {where}: {first['msg']}"
        ) from error
    newest = [(each.metric, *max(each.values)) for each in series if each.values]
    return [
        _Sample(name=labels.get("__name__", ""), labels=labels, time_s=time_s, value=value)
        for labels, time_s, value in newest
        if not math.isnan(value)
    ]


def _promql_string(value: str) -> str:
    """Return a PromQL string; it escapes as Go does, and JSON's escapes are some of Go's."""
    return json.dumps(value, ensure_ascii=False)
