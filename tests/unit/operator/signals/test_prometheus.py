"""Signals from a Prometheus that responds, lags, returns nonsense or is down."""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from tests.fixtures.operator.prometheus import SCRAPED_S, answer, scrape
from tests.fixtures.operator.runs import KEY
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.control.signals import RunSignals, WorkerSignals
from vcpo.wire.phase import RunPhase
from vcpo_operator.names import RunKey
from vcpo_operator.signals.client import LearnerConnections
from vcpo_operator.signals.prometheus import ScrapedSignals, parse_answer

PERIOD_S = 2.0


@dataclass
class PrometheusFixture:
    """A server that says what a test wants, and a source that reads from it."""

    answers: bytes = field(default_factory=lambda: answer(scrape()))
    status: int = 200
    queries: list[str] = field(default_factory=list)
    now_s: float = SCRAPED_S + 4.0
    url: str = ""
    source: ScrapedSignals = field(init=False)

    async def handle(self, request: web.Request) -> web.Response:
        self.queries.append(request.query["query"])
        return web.Response(body=self.answers, status=self.status)

    async def ask(self, key: RunKey = KEY) -> Any:
        return await self.source.fetch_signals(key, period_s=PERIOD_S)

    async def later(self, seconds: float) -> Any:
        self.now_s += seconds
        return await self.ask()


@pytest.fixture(name="fixture")
async def prometheus_fixture() -> AsyncIterator[PrometheusFixture]:
    fixture = PrometheusFixture()
    application = web.Application()
    application.router.add_get("/api/v1/query", fixture.handle)
    # A question that was given up ends its handler; else cleaning up would wait for it.
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fixture.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    clock = lambda: fixture.now_s  # noqa: E731 - read at each call
    lines = LearnerConnections(clock=clock, address_of=lambda key: "127.0.0.1:1")
    fixture.source = ScrapedSignals(url=fixture.url, connections=lines, clock=clock)
    yield fixture
    await fixture.source.close()
    await runner.cleanup()


async def test_one_query_makes_a_report(fixture: PrometheusFixture):
    signals = await fixture.ask()
    assert (signals.step, signals.age_s, signals.is_fresh) == (5, 4.0, True)
    (query,) = fixture.queries
    assert query.startswith('{__name__=~"vcpo_policy_version|')
    assert query.endswith('",namespace="ml",run="demo"}[5m]')


async def test_a_scrape_is_news_once(fixture: PrometheusFixture):
    await fixture.ask()
    signals = await fixture.later(PERIOD_S)
    assert (signals.age_s, signals.is_fresh) == (6.0, False)
    fixture.answers = answer([*scrape(), *scrape(SCRAPED_S + 15.0, vcpo_learner_step=6.0)])
    signals = await fixture.later(15.0)
    assert (signals.step, signals.is_fresh) == (6, True)


async def test_a_replica_that_lags_does_not_turn_time_back(fixture: PrometheusFixture):
    fixture.answers = answer(scrape(SCRAPED_S + 2.0, vcpo_learner_step=6.0))
    await fixture.ask()
    fixture.answers = answer(scrape())
    signals = await fixture.later(PERIOD_S)
    assert (signals.step, signals.is_fresh) == (6, False)


@pytest.mark.parametrize("status", [200, 503], ids=["no series", "refused"])
async def test_series_that_ended_leave_what_was_read_last_and_its_age(
    fixture: PrometheusFixture, status: int
):
    await fixture.ask()
    fixture.answers, fixture.status = answer([]), status
    signals = await fixture.later(600.0)
    assert (signals.step, signals.age_s) == (5, 604.0)


async def test_a_run_that_was_never_scraped_says_nothing(fixture: PrometheusFixture):
    fixture.answers = answer([])
    assert await fixture.ask() is None


async def test_nonsense_of_one_run_does_not_silence_another(fixture: PrometheusFixture):
    fixture.answers = answer(scrape(vcpo_learner_idle_ratio=7.0))
    await fixture.ask()
    fixture.answers = answer(scrape())
    assert await fixture.ask(RunKey("ml", "other")) is not None


async def test_a_prometheus_that_did_not_answer_is_left_alone_for_a_while(
    fixture: PrometheusFixture,
):
    fixture.status = 503
    await fixture.ask()
    fixture.status = 200
    assert await fixture.ask(RunKey("ml", "other")) is None
    assert len(fixture.queries) == 1
    assert await fixture.later(10.0) is not None


async def test_trouble_is_logged_once(fixture: PrometheusFixture, caplog: pytest.LogCaptureFixture):
    fixture.status = 503
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await fixture.later(60.0)
    (record,) = caplog.records
    assert f"ml/demo: no signals: {fixture.url}" in record.getMessage()
    cause = fixture.source.silence(KEY)
    assert cause is not None
    assert cause.reason == "PrometheusSilent"
    assert "503" in cause.message


def read_signals(samples) -> RunSignals:
    _, signals = parse_answer(answer(samples), now_s=SCRAPED_S + 4.0)
    return signals


def test_what_was_not_measured_is_unknown():
    signals = read_signals(scrape(vcpo_ess_ratio=0.0))
    assert (signals.buffered, signals.in_flight) == (10, 11)
    assert (signals.batch_trajectories, signals.lag_limit_steps) == (128, 8)
    assert (signals.relative_ess_ratio, signals.accuracy) == (None, None)
    assert read_signals(scrape(vcpo_learner_step=0.0)).last is None


def test_what_was_measured_is_read():
    measured = {
        "vcpo_ess_ratio": 0.5,
        "vcpo_ess_mean_ratio": 0.625,
        "vcpo_on_policy_ess_ratio": 0.875,
        "vcpo_learning_rate_scale_ratio": 0.75,
        "vcpo_collapse_warning_ratio": 0.6875,
        "vcpo_token_lag_median_steps": 2.0,
        "vcpo_evaluation_accuracy": 0.125,
    }
    signals = read_signals(scrape(**measured))
    last = signals.last
    assert (last.ess_ratio, last.ess_ratio_mean) == (0.5, 0.625)
    assert (last.learning_rate_scale, signals.accuracy) == (0.75, 0.125)
    assert (last.lag_p50, last.on_policy_ess_ratio) == (2, 0.875)
    assert (last.warning_score, signals.warning_level) == (0.6875, WarningLevel.CRITICAL)


@pytest.mark.parametrize("phase", RunPhase)
def test_the_phase_is_the_one_whose_series_is_one(phase: RunPhase):
    assert read_signals(scrape(phase=phase.value)).phase is phase
    assert read_signals(scrape(phase="pondering")).phase is RunPhase.RUNNING


def test_workers_are_counted_by_group_and_known_by_their_pod():
    groups = [("vcpo_workers", {"group": name}, SCRAPED_S, n) for name, n in (("a", 2), ("b", 0))]
    pod = {"pod": "demo-rollout-main-x", "group": "main"}
    samples = [("vcpo_rollout_in_flight", pod, SCRAPED_S - s, n) for s, n in ((20, 9), (5, 6))]
    nameless = ("vcpo_rollout_in_flight", {"group": "main"}, SCRAPED_S, 6.0)
    signals = read_signals([*scrape(), *groups, *samples, nameless])
    assert signals.ready_workers == {"a": 2, "b": 0}
    known = {"demo-rollout-main-x": WorkerSignals(in_flight=6, silent_s=9.0)}
    assert signals.workers == known


def test_a_series_that_the_newest_scrape_lacks_is_unknown():
    older = scrape(SCRAPED_S - 15.0, vcpo_ess_mean_ratio=0.9)
    assert read_signals([*older, *scrape()]).relative_ess_ratio_mean is None


@pytest.mark.parametrize(
    "said",
    [
        b"<html>",
        b"{}",
        answer(scrape(vcpo_learner_step=None)),
        answer(scrape(vcpo_learner_idle_ratio=7.0)),
    ],
)
def test_an_answer_without_signals_is_refused(said: bytes):
    with pytest.raises(ValueError):  # noqa: PT011 - the library's words
        parse_answer(said, now_s=SCRAPED_S)
