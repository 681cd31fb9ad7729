"""Signals from a Prometheus that responds, lags, returns nonsense or is down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from tests.fixtures.operator.prometheus import SCRAPED_S, answer, scrape
from tests.fixtures.operator.runs import KEY
from vcpo.control.signals import RunSignals
from vcpo_operator.names import RunKey
from vcpo_operator.observed.promql import run_query
from vcpo_operator.signals.client import LearnerConnections
from vcpo_operator.signals.prometheus import (
    Prometheus,
    PrometheusError,
    ScrapedSignals,
    validate_url,
)

PERIOD_S = 2.0


@dataclass
class PrometheusFixture:
    """A server that says what a test wants, and a source that reads from it."""

    answers: bytes = field(default_factory=lambda: answer(scrape()))
    status: int = 200
    hangs: bool = False
    queries: list[str] = field(default_factory=list)
    now_s: float = SCRAPED_S + 4.0
    url: str = ""
    source: ScrapedSignals = field(init=False)

    async def handle(self, request: web.Request) -> web.Response:
        self.queries.append(request.query["query"])
        if self.hangs:
            await asyncio.Event().wait()
        return web.Response(body=self.answers, status=self.status)

    async def ask(self, key: RunKey = KEY) -> RunSignals | None:
        return await self.source.fetch_signals(key, period_s=PERIOD_S)

    async def later(self, seconds: float) -> RunSignals | None:
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
    prometheus = Prometheus(fixture.url, timeout_s=5.0)
    fixture.source = ScrapedSignals(prometheus, lines, clock=clock)
    yield fixture
    await fixture.source.close()
    await runner.cleanup()


async def test_one_query_makes_a_report(fixture: PrometheusFixture):
    signals = await fixture.ask()
    assert signals is not None
    assert (signals.step, signals.age_s, signals.is_fresh) == (5, 4.0, True)
    assert fixture.queries == [run_query(KEY)]


async def test_a_scrape_is_news_once(fixture: PrometheusFixture):
    await fixture.ask()
    signals = await fixture.later(PERIOD_S)
    assert signals is not None
    assert (signals.age_s, signals.is_fresh) == (6.0, False)
    fixture.answers = answer([*scrape(), *scrape(SCRAPED_S + 15.0, vcpo_learner_step=6.0)])
    signals = await fixture.later(15.0)
    assert signals is not None
    assert (signals.step, signals.is_fresh) == (6, True)


async def test_events_do_not_make_prometheus_answer_more_often(fixture: PrometheusFixture):
    await fixture.ask()
    signals = await fixture.later(0.5)
    assert signals is not None
    assert signals.age_s == 4.5
    assert len(fixture.queries) == 1


async def test_a_replica_that_lags_does_not_turn_time_back(fixture: PrometheusFixture):
    fixture.answers = answer(scrape(SCRAPED_S + 2.0, vcpo_learner_step=6.0))
    await fixture.ask()
    fixture.answers = answer(scrape())
    signals = await fixture.later(PERIOD_S)
    assert signals is not None
    assert (signals.step, signals.is_fresh) == (6, False)


async def test_series_that_ended_leave_what_was_read_last_and_its_age(fixture: PrometheusFixture):
    await fixture.ask()
    fixture.answers = answer([])
    signals = await fixture.later(600.0)
    assert signals is not None
    assert (signals.step, signals.age_s) == (5, 604.0)


async def test_a_run_that_was_never_scraped_says_nothing(fixture: PrometheusFixture):
    fixture.answers = answer([])
    assert await fixture.ask() is None


async def test_nonsense_counts_as_silence(fixture: PrometheusFixture):
    fixture.answers = b"<html>"
    assert await fixture.ask() is None


async def test_nonsense_of_one_run_does_not_silence_another(fixture: PrometheusFixture):
    fixture.answers = answer(scrape(vcpo_learner_idle_ratio=7.0))
    await fixture.ask()
    fixture.answers = answer(scrape())
    assert await fixture.ask(RunKey("ml", "other")) is not None


async def test_a_prometheus_that_refuses_leaves_what_was_read_last(fixture: PrometheusFixture):
    await fixture.ask()
    fixture.status = 503
    signals = await fixture.later(30.0)
    assert signals is not None
    assert signals.age_s == 34.0


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
    assert f"ml/demo: no signals from Prometheus: {fixture.url}" in record.getMessage()


async def test_a_learner_that_is_gone_is_forgotten(fixture: PrometheusFixture):
    await fixture.ask()
    await fixture.source.disconnect(KEY)
    fixture.answers = answer([])
    assert await fixture.ask() is None


async def test_an_error_names_the_address_what_was_said_and_the_cure(fixture: PrometheusFixture):
    fixture.status, fixture.answers = 400, b"parse error"
    prometheus = Prometheus(fixture.url)
    said = r"/api/v1/query: status 400: parse error; check that Prometheus runs, --prometheus-url"
    with pytest.raises(PrometheusError, match=said):
        await prometheus.query("{")
    await prometheus.close()


async def test_an_answer_without_end_is_refused(fixture: PrometheusFixture):
    fixture.answers = b" " * (4 * 1024 * 1024 + 1)
    prometheus = Prometheus(fixture.url)
    with pytest.raises(PrometheusError, match="more than 4194304 bytes"):
        await prometheus.query("up")
    await prometheus.close()


async def test_a_query_has_a_deadline(fixture: PrometheusFixture):
    fixture.hangs = True
    prometheus = Prometheus(fixture.url, timeout_s=0.05)
    with pytest.raises(PrometheusError, match=r"no answer within 0\.05 s"):
        await prometheus.query("up")
    await prometheus.close()


async def test_nobody_who_listens_is_an_error():
    prometheus = Prometheus("http://127.0.0.1:1")
    with pytest.raises(PrometheusError, match=r"127\.0\.0\.1:1"):
        await prometheus.query("up")
    await prometheus.close()


@pytest.mark.parametrize("url", ["https://thanos.example.com/api", "http://prometheus:9090/"])
def test_an_address_may_have_a_port_and_a_path(url: str):
    assert validate_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "prometheus:9090",
        "ftp://prometheus",
        "http://",
        "http://me:secret@prometheus",
        "http://prometheus/?query=up",
        "http://prometheus/#graph",
        "http://prometheus 9090",
    ],
)
def test_what_is_no_address_of_a_server_is_refused(url: str):
    with pytest.raises(ValueError, match="--prometheus-url must be"):
        validate_url(url)
