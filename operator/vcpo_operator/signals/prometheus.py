"""Signals from a Prometheus, for clusters in which only a Prometheus may reach the learners.

It replaces `client.LearnerConnections` as the source of signals; commands still go over those
connections. When the Prometheus is down, late or has no samples of a run, the signals get old, and
`vcpo.control` then changes nothing.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from vcpo.control.signals import RunSignals
from vcpo_operator.names import RunKey
from vcpo_operator.observed.promql import DatedSignals, parse_answer, run_query
from vcpo_operator.observed.records import Cause
from vcpo_operator.signals.client import LearnerConnections

_LOGGER = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_PAUSE_S = 10.0
"""Time without queries after one that got no answer. A Prometheus that is down then delays the
reconciles of other runs only a little."""
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_CHUNK_BYTES = 64 * 1024
_MAX_ERROR_CHARACTERS = 200
_OK = 200


class PrometheusError(Exception):
    """Prometheus did not answer a query; the message names its address and a cure."""


class Prometheus:
    """The query API of one Prometheus, or of a compatible server (Thanos, Mimir)."""

    def __init__(self, url: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._url = f"{validate_url(url)}/api/v1/query"
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def query(self, expression: str) -> bytes:
        """Return the answer to an instant query, unparsed.

        Raises: PrometheusError when there is none in time.
        """
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            self._session = aiohttp.ClientSession(timeout=timeout)
        try:
            async with self._session.get(self._url, params={"query": expression}) as response:
                status, body = response.status, await _read_body(response)
        except TimeoutError as error:
            raise self._error(f"no answer within {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise self._error(str(error) or type(error).__name__) from error
        if status != _OK:
            text = body[:_MAX_ERROR_CHARACTERS].decode(errors="replace")
            raise self._error(f"status {status}: {text}")
        return body

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _error(self, what: str) -> PrometheusError:
        cure = "check that Prometheus runs, --prometheus-url and the network policies between"
        return PrometheusError(f"{self._url}: {what}; {cure}")


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """Read a body of bounded size.

    Raises: aiohttp.ClientPayloadError when it is larger.
    """
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += chunk
        if len(body) > _MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def validate_url(url: str) -> str:
    """Return the address of a server without a slash at its end.

    Raises: ValueError when it is not the address of a server.
    """
    if re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url) is None:
        raise ValueError(
            "--prometheus-url must be http(s)://host[:port][/path], without credentials,"
            f" not '{url}'"
        )
    return url.rstrip("/")


@dataclass(slots=True, kw_only=True)
class _LastScrape:
    """The last known scrape of one run."""

    asked_s: float = -math.inf
    scraped: DatedSignals | None = None
    error: str = ""
    """Why the last query failed; empty when it did not."""

    def update(self, scraped: DatedSignals | None) -> bool:
        """Keep a scrape if it is newer; return whether it is."""
        if scraped is None or (self.scraped and scraped.scraped_s <= self.scraped.scraped_s):
            return False
        self.scraped = scraped
        return True

    def signals(self, now_s: float, *, is_fresh: bool) -> RunSignals | None:
        return None if self.scraped is None else self.scraped.at(now_s, is_fresh=is_fresh)


class ScrapedSignals:
    """Signals of all runs from a Prometheus. One owner: the operator's event loop.

    connections: Closed together with this source; commands go over them.
    clock: Unix time, since samples carry it.
    """

    def __init__(
        self,
        prometheus: Prometheus,
        connections: LearnerConnections,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._prometheus = prometheus
        self._connections = connections
        self._clock = clock
        self._scrapes: dict[RunKey, _LastScrape] = {}
        self._paused_until_s = -math.inf

    async def fetch_signals(self, key: RunKey, *, period_s: float) -> RunSignals | None:
        """Return the signals of the newest scrape, with their age; None: there were none.

        They are fresh once: when their scrape is first seen.
        """
        now_s = self._clock()
        last = self._scrapes.setdefault(key, _LastScrape())
        if now_s - last.asked_s < period_s / 2 or now_s < self._paused_until_s:
            return last.signals(now_s, is_fresh=False)
        last.asked_s = now_s
        is_fresh = last.update(await self._query(key, last))
        return last.signals(self._clock(), is_fresh=is_fresh)

    def silence(self, key: RunKey) -> Cause | None:
        """Return why the newest query failed; None if it did not, or none was made."""
        last = self._scrapes.get(key)
        if last is None or not last.error:
            return None
        return Cause(reason="PrometheusSilent", message=last.error)

    async def disconnect(self, key: RunKey) -> None:
        """Forget a learner that is gone, and its signals."""
        self._scrapes.pop(key, None)
        await self._connections.disconnect(key)

    async def close(self) -> None:
        """Close all connections."""
        await self._prometheus.close()
        await self._connections.close()

    async def _query(self, key: RunKey, last: _LastScrape) -> DatedSignals | None:
        scraped, message = None, ""
        try:
            answer = await self._prometheus.query(run_query(key))
            scraped = parse_answer(answer, now_s=self._clock())
        except PrometheusError as error:
            self._paused_until_s = self._clock() + _PAUSE_S
            message = str(error)
        except ValueError as error:
            message = str(error)
        if message and not last.error:  # once, not at every reconcile
            _LOGGER.warning("%s: no signals from Prometheus: %s", key, message)
        last.error = message
        return scraped
