"""Reading signals from a Prometheus that answers, lags, talks nonsense or is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from tests.fixtures.operator.prometheus import SCRAPED_S, answer, scrape
from tests.fixtures.operator.runs import KEY
from vcpo_operator.names import RunKey
from vcpo_operator.observed.promql import run_query
from vcpo_operator.observed.report import LearnerReport
from vcpo_operator.signals.client import LearnerConnections
from vcpo_operator.signals.prometheus import (
    Prometheus,
    PrometheusError,
    ScrapedSignals,
    validate_url,
)

PERIOD_S = 2.0


@dataclass
class Scene:
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

    async def ask(self, key: RunKey = KEY) -> LearnerReport | None:
        return await self.source.ask(key, period_s=PERIOD_S)

    async def later(self, seconds: float) -> LearnerReport | None:
        self.now_s += seconds
        return await self.ask()


@pytest.fixture(name="scene")
async def served_scene() -> AsyncIterator[Scene]:
    scene = Scene()
    application = web.Application()
    application.router.add_get("/api/v1/query", scene.handle)
    # A question that was given up ends its handler; else cleaning up would wait for it.
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    scene.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    clock = lambda: scene.now_s  # noqa: E731 - read at each call
    lines = LearnerConnections(clock=clock, address_of=lambda key: "127.0.0.1:1")
    scene.source = ScrapedSignals(Prometheus(scene.url, timeout_s=5.0), lines, clock=clock)
    yield scene
    await scene.source.close()
    await runner.cleanup()


async def test_one_query_makes_a_report(scene: Scene):
    report = await scene.ask()
    assert report is not None
    assert (report.signals.step, report.signals.age_s, report.is_fresh) == (5, 4.0, True)
    assert scene.queries == [run_query(KEY)]


async def test_a_scrape_is_news_once(scene: Scene):
    await scene.ask()
    report = await scene.later(PERIOD_S)
    assert report is not None
    assert (report.signals.age_s, report.is_fresh) == (6.0, False)
    scene.answers = answer([*scrape(), *scrape(SCRAPED_S + 15.0, vcpo_policy_version=6.0)])
    report = await scene.later(15.0)
    assert report is not None
    assert (report.signals.step, report.is_fresh) == (6, True)


async def test_events_do_not_make_prometheus_answer_more_often(scene: Scene):
    await scene.ask()
    report = await scene.later(0.5)
    assert report is not None
    assert report.signals.age_s == 4.5
    assert len(scene.queries) == 1


async def test_a_replica_that_lags_does_not_turn_time_back(scene: Scene):
    scene.answers = answer(scrape(SCRAPED_S + 2.0, vcpo_policy_version=6.0))
    await scene.ask()
    scene.answers = answer(scrape())
    report = await scene.later(PERIOD_S)
    assert report is not None
    assert (report.signals.step, report.is_fresh) == (6, False)


async def test_series_that_ended_leave_what_was_read_last_and_its_age(scene: Scene):
    await scene.ask()
    scene.answers = answer([])
    report = await scene.later(600.0)
    assert report is not None
    assert (report.signals.step, report.signals.age_s) == (5, 604.0)


async def test_a_run_that_was_never_scraped_says_nothing(scene: Scene):
    scene.answers = answer([])
    assert await scene.ask() is None


async def test_nonsense_counts_as_silence(scene: Scene):
    scene.answers = b"<html>"
    assert await scene.ask() is None


async def test_nonsense_of_one_run_does_not_silence_another(scene: Scene):
    scene.answers = answer(scrape(vcpo_learner_idle_ratio=7.0))
    await scene.ask()
    scene.answers = answer(scrape())
    assert await scene.ask(RunKey("ml", "other")) is not None


async def test_a_prometheus_that_refuses_leaves_what_was_read_last(scene: Scene):
    await scene.ask()
    scene.status = 503
    report = await scene.later(30.0)
    assert report is not None
    assert report.signals.age_s == 34.0


async def test_a_prometheus_that_did_not_answer_is_left_alone_for_a_while(scene: Scene):
    scene.status = 503
    await scene.ask()
    scene.status = 200
    assert await scene.ask(RunKey("ml", "other")) is None
    assert len(scene.queries) == 1
    assert await scene.later(10.0) is not None


async def test_trouble_is_logged_once(scene: Scene, caplog: pytest.LogCaptureFixture):
    scene.status = 503
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await scene.later(60.0)
    (record,) = caplog.records
    assert f"ml/demo: no signals from Prometheus: {scene.url}" in record.getMessage()


async def test_a_learner_that_is_gone_is_forgotten(scene: Scene):
    await scene.ask()
    await scene.source.disconnect(KEY)
    scene.answers = answer([])
    assert await scene.ask() is None


async def test_an_error_names_the_address_what_was_said_and_the_cure(scene: Scene):
    scene.status, scene.answers = 400, b"parse error"
    prometheus = Prometheus(scene.url)
    said = r"/api/v1/query: status 400: parse error; check that Prometheus runs, --prometheus-url"
    with pytest.raises(PrometheusError, match=said):
        await prometheus.query("{")
    await prometheus.close()


async def test_an_answer_without_end_is_refused(scene: Scene):
    scene.answers = b" " * (4 * 1024 * 1024 + 1)
    prometheus = Prometheus(scene.url)
    with pytest.raises(PrometheusError, match="more than 4194304 bytes"):
        await prometheus.query("up")
    await prometheus.close()


async def test_a_query_has_a_deadline(scene: Scene):
    scene.hangs = True
    prometheus = Prometheus(scene.url, timeout_s=0.05)
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
