"""Signals from a Prometheus, for clusters in which only a Prometheus may reach the learners.

One instant query asks for the run's own gauges over a window of time. The signals are those of the
learner's newest scrape: what it lacks is unknown. Without samples they get old, and `vcpo.control`
then changes nothing. Commands go over the connections of `client`.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from vcpo.algo.health.early_warning import warning_level
from vcpo.control.signals import RunSignals, WorkerSignals, checked_signals
from vcpo.metrics.step_gauges import GAUGES, record_of_metrics
from vcpo.wire.phase import RunPhase
from vcpo_operator.names import RunKey
from vcpo_operator.observed.records import Cause
from vcpo_operator.signals.client import LearnerConnections

_LOGGER = logging.getLogger(__name__)
_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)
_PAUSE_S: Final = 10.0
"""Time without queries after one that got no answer, for the other runs' sake."""
_STATE: Final[Mapping[str, str]] = {
    "vcpo_policy_version": "policy_version",
    "vcpo_trajectories_buffered": "buffered",
    "vcpo_trajectories_in_flight": "in_flight",
    "vcpo_batch_trajectories": "batch_trajectories",
    "vcpo_admission_lag_steps": "lag_limit_steps",
    "vcpo_failures_in_a_row": "failures_in_a_row",
    "vcpo_learner_lost_changes": "lost_changes",
    "vcpo_evaluation_accuracy": "accuracy",
    "vcpo_learner_idle_ratio": "learner_idle_ratio",
}
"""Fields of `RunSignals` by the gauge that shows them; the record of the step has its own."""
_PHASE, _GROUP, _STEP = "vcpo_learner_phase", "vcpo_workers", "vcpo_learner_step"
_WORKER: Final = "vcpo_rollout_in_flight"
_OF_STEP: Final = tuple(gauge.name for gauge in GAUGES)
_NAMES: Final = "|".join((*_STATE, *_OF_STEP, _PHASE, _GROUP, _STEP, _WORKER))


@dataclass(slots=True, kw_only=True)
class _Scrape:
    asked_s: float = -math.inf
    scraped_s: float = -math.inf
    signals: RunSignals | None = None
    error: str = ""
    """Why the last query failed; empty when it did not."""


@dataclass(slots=True, kw_only=True, eq=False)
class ScrapedSignals:
    """Signals of all runs from a Prometheus. One owner: the operator's event loop."""

    url: str
    connections: LearnerConnections
    clock: Callable[[], float]
    """Unix time, since samples carry it."""
    _session: aiohttp.ClientSession | None = None
    _scrapes: dict[RunKey, _Scrape] = field(default_factory=dict)
    _paused_until_s: float = -math.inf

    async def fetch_signals(self, key: RunKey, *, period_s: float) -> RunSignals | None:
        """Return the signals of the newest scrape, fresh when it is first seen; None: no scrape."""
        now_s, last, is_fresh = self.clock(), self._scrapes.setdefault(key, _Scrape()), False
        if now_s - last.asked_s >= period_s / 2 and now_s >= self._paused_until_s:
            last.asked_s = now_s
            is_fresh = await self._query(key, last)
        if last.signals is None:
            return None
        aged = last.signals.at_age(max(0.0, self.clock() - last.scraped_s))
        return dataclasses.replace(aged, is_fresh=is_fresh)

    def silence(self, key: RunKey) -> Cause | None:
        error = self._scrapes.get(key, _Scrape()).error
        return Cause(reason="PrometheusSilent", message=error) if error else None

    async def disconnect(self, key: RunKey) -> None:
        self._scrapes.pop(key, None)
        await self.connections.disconnect(key)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self.connections.close()

    async def _query(self, key: RunKey, last: _Scrape) -> bool:
        """Keep the newest scrape of a run if it is newer; return whether it is."""
        namespace, run = (json.dumps(each, ensure_ascii=False) for each in key)
        selector = f'{{__name__=~"{_NAMES}",namespace={namespace},run={run}}}[5m]'
        address, error = f"{self.url.rstrip('/')}/api/v1/query", ""
        try:
            self._session = self._session or aiohttp.ClientSession(timeout=_TIMEOUT)
            async with self._session.get(address, params={"query": selector}) as response:
                response.raise_for_status()
                scraped_s, signals = parse_answer(await response.read(), now_s=self.clock())
        except (aiohttp.ClientError, TimeoutError, ValueError) as failure:
            scraped_s, signals, error = 0.0, None, f"{address}: {failure or 'no answer in time'}"
            if not isinstance(failure, ValueError):
                self._paused_until_s = self.clock() + _PAUSE_S
            level = logging.DEBUG if last.error else logging.WARNING
            _LOGGER.log(level, "%s: no signals: %s", key, error)
        last.error, is_news = error, signals is not None and scraped_s > last.scraped_s
        if is_news:
            last.scraped_s, last.signals = scraped_s, signals
        return is_news


def parse_answer(answer: bytes, *, now_s: float) -> tuple[float, RunSignals | None]:
    """Return time and signals of the learner's newest scrape; ValueError if they cannot be used."""
    try:
        series = json.loads(answer)["data"]["result"]
        newest = [(each["metric"], *max(each["values"])) for each in series if each["values"]]
        samples = [(labels, float(at_s), float(value)) for labels, at_s, value in newest]
        scraped_s = max((at for it, at, _ in samples if it["__name__"] != _WORKER), default=0.0)
        scrape = [(labels, value) for labels, at, value in samples if at == scraped_s]
        workers = {
            labels["pod"]: WorkerSignals(in_flight=int(value), silent_s=max(0.0, now_s - at))
            for labels, at, value in sorted(samples, key=lambda each: each[1])
            if labels["__name__"] == _WORKER and labels.get("pod")
        }
        return scraped_s, _signals(scrape, workers) if scraped_s else None
    except (AttributeError, KeyError, StopIteration, TypeError) as error:
        raise ValueError(f"not what a learner's scrape holds: {error!r}") from error


def _signals(
    scrape: list[tuple[dict[str, str], float]], workers: Mapping[str, WorkerSignals]
) -> RunSignals:
    values = {labels["__name__"]: value for labels, value in scrape if not math.isnan(value)}
    known: dict[str, Any] = {
        name: values[gauge] for gauge, name in _STATE.items() if gauge in values
    }
    named = [(labels, value) for labels, value in scrape if labels["__name__"] in {_PHASE, _GROUP}]
    current = next(it["phase"] for it, value in named if "phase" in it and value == 1.0)
    step, last = values[_STEP], None
    if step:
        level = warning_level(values.get("vcpo_collapse_warning_ratio", 0.0))
        last = record_of_metrics(values, step=step, warning_level=level.value)
    known["phase"] = {each.value: each for each in RunPhase}.get(current, RunPhase.RUNNING)
    known["ready_workers"] = {it["group"]: value for it, value in named if "group" in it}
    return checked_signals({**known, "last": last, "workers": workers})
