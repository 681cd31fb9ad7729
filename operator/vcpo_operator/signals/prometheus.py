"""Signals from a Prometheus: for clusters whose policies let only a Prometheus reach learners.

An alternative to `client.LearnerConnections` as a source of reports; orders to learners
still go over those. A Prometheus that is down, lags or knows nothing of a run makes reports old and
nothing else: `vcpo.control` then holds everything.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from vcpo_operator.names import RunKey
from vcpo_operator.observed.promql import ScrapedReport, parse_answer, run_query
from vcpo_operator.observed.report import LearnerReport
from vcpo_operator.signals.client import LearnerConnections

_LOGGER = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_REST_S = 10.0
"""How long a Prometheus that did not answer is left alone, so that a dead one costs each look at a
run little of the time in which others wait to be looked at."""
_LONGEST_ANSWER_BYTES = 4 * 1024 * 1024
_CHUNK_BYTES = 64 * 1024
_LONGEST_COMPLAINT = 200
_OK = 200


class PrometheusError(Exception):
    """Prometheus did not answer a query; the message has its address and a cure."""


class Prometheus:
    """The query API of one Prometheus, or of what speaks like one (Thanos, Mimir)."""

    def __init__(self, url: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._url = f"{validate_url(url)}/api/v1/query"
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def query(self, expression: str) -> bytes:
        """The answer to an instant query, as it came.

        Raises: PrometheusError when none came in time.
        """
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            self._session = aiohttp.ClientSession(timeout=timeout)
        try:
            async with self._session.get(self._url, params={"query": expression}) as response:
                status, body = response.status, await _body(response)
        except TimeoutError as error:
            raise self._error(f"no answer within {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise self._error(str(error) or type(error).__name__) from error
        if status != _OK:
            said = body[:_LONGEST_COMPLAINT].decode(errors="replace")
            raise self._error(f"status {status}: {said}")
        return body

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _error(self, what: str) -> PrometheusError:
        cure = "check that Prometheus runs, --prometheus-url and the network policies between"
        return PrometheusError(f"{self._url}: {what}; {cure}")


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += chunk
        if len(body) > _LONGEST_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"more than {_LONGEST_ANSWER_BYTES} bytes")
    return bytes(body)


def validate_url(url: str) -> str:
    """The address without a slash at its end.

    Raises: ValueError when it is not that of a server.
    """
    if re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url) is None:
        raise ValueError(
            "--prometheus-url must be http(s)://host[:port][/path], without credentials,"
            f" not '{url}'"
        )
    return url.rstrip("/")


@dataclass(slots=True, kw_only=True)
class _Heard:
    """What was read of one run last."""

    asked_s: float = -math.inf
    scraped: ScrapedReport | None = None
    complaint: str = ""

    def note(self, found: ScrapedReport | None) -> bool:
        """Keep what was read if it is newer than what is known; whether it is."""
        if found is None or (self.scraped and found.scraped_s <= self.scraped.scraped_s):
            return False
        self.scraped = found
        return True

    def report(self, now_s: float, *, is_fresh: bool) -> LearnerReport | None:
        return None if self.scraped is None else self.scraped.at(now_s, is_fresh=is_fresh)


class ScrapedSignals:
    """Reports of all runs by what a Prometheus scraped. One owner: the operator's loop.

    lines: Over these learners get their orders; hung up and closed together with this.
    clock: Unix time, since samples carry it.
    """

    def __init__(
        self, prometheus: Prometheus, lines: LearnerConnections, *, clock: Callable[[], float]
    ) -> None:
        self._prometheus = prometheus
        self._lines = lines
        self._clock = clock
        self._heard: dict[RunKey, _Heard] = {}
        self._rest_until_s = -math.inf

    async def ask(self, key: RunKey, *, period_s: float) -> LearnerReport | None:
        """What the learner said at its newest scrape, with the age of that; None: never anything.

        A report is news once, when its scrape was not known before.
        """
        now_s = self._clock()
        heard = self._heard.setdefault(key, _Heard())
        if now_s - heard.asked_s < period_s / 2 or now_s < self._rest_until_s:
            return heard.report(now_s, is_fresh=False)
        heard.asked_s = now_s
        is_fresh = heard.note(await self._read(key, heard))
        return heard.report(self._clock(), is_fresh=is_fresh)

    async def disconnect(self, key: RunKey) -> None:
        """Forget a learner that is gone, and what it said."""
        self._heard.pop(key, None)
        await self._lines.disconnect(key)

    async def close(self) -> None:
        """Close all connections."""
        await self._prometheus.close()
        await self._lines.close()

    async def _read(self, key: RunKey, heard: _Heard) -> ScrapedReport | None:
        found, complaint = None, ""
        try:
            answer = await self._prometheus.query(run_query(key))
            found = parse_answer(answer, now_s=self._clock())
        except PrometheusError as error:
            self._rest_until_s = self._clock() + _REST_S
            complaint = str(error)
        except ValueError as error:
            complaint = str(error)
        if complaint and not heard.complaint:  # once, not at every look
            _LOGGER.warning("%s: no signals from Prometheus: %s", key, complaint)
        heard.complaint = complaint
        return found
