"""Probes: one request to a container, and the count of results that decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.kubelet.environment import JsonObject, UnsupportedPodError, port_number

_FINE = range(200, 400)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget:
    """The container that is asked."""

    container: JsonObject
    pod_ip: str
    execute: Callable[[list[str]], Awaitable[int]]
    """Runs a command in the container; answers its exit code."""


async def ask(probe: JsonObject, target: ProbeTarget) -> bool:
    """Put a probe's question once; no answer within its timeout is a no.

    Raises:
        UnsupportedPodError: for kinds of probes that the fake kubelet does not know.
    """
    for kind, question in _QUESTIONS.items():
        if kind in probe:
            try:
                async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
                    return await question(probe[kind], target)
            except (OSError, TimeoutError, aiohttp.ClientError, grpc.aio.AioRpcError):
                return False
    raise UnsupportedPodError(f"probe: none of {', '.join(_QUESTIONS)} in {sorted(probe)}")


async def _grpc(probe: JsonObject, target: ProbeTarget) -> bool:
    address = f"{target.pod_ip}:{probe['port']}"
    direct = (("grpc.enable_http_proxy", 0),)
    async with grpc.aio.insecure_channel(address, options=direct) as channel:
        request = health_pb2.HealthCheckRequest(service=probe.get("service") or "")
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            request, timeout=probe.get("timeoutSeconds", 1)
        )
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _http(probe: JsonObject, target: ProbeTarget) -> bool:
    port = port_number(target.container, probe["port"])
    url = f"http://{target.pod_ip}:{port}{probe.get('path', '/')}"
    headers: Mapping[str, str] = {
        each["name"]: each["value"] for each in probe.get("httpHeaders") or ()
    }
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status in _FINE


async def _tcp(probe: JsonObject, target: ProbeTarget) -> bool:
    port = port_number(target.container, probe["port"])
    _, writer = await asyncio.open_connection(target.pod_ip, port)
    writer.close()
    return True


async def _exec(probe: JsonObject, target: ProbeTarget) -> bool:
    return await target.execute(list(probe["command"])) == 0


_QUESTIONS: dict[str, Callable[[JsonObject, ProbeTarget], Awaitable[bool]]] = {
    "grpc": _grpc,
    "httpGet": _http,
    "tcpSocket": _tcp,
    "exec": _exec,
}


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts answers of one probe. Owner: the loop that asks."""

    success_threshold: int = 1
    failure_threshold: int = 3
    _successes: int = field(default=0, init=False)
    _failures: int = field(default=0, init=False)

    def count(self, *, success: bool) -> bool | None:
        """Take in an answer: True or False once enough of a kind came in a row, else None."""
        self._successes = self._successes + 1 if success else 0
        self._failures = 0 if success else self._failures + 1
        if self._successes >= self.success_threshold:
            return True
        if self._failures >= self.failure_threshold:
            return False
        return None


async def verdicts(
    probe: JsonObject, target: ProbeTarget, longest_period_s: float
) -> AsyncGenerator[bool, None]:
    """Ask for ever; yields a verdict with every answer that makes or confirms one."""
    await asyncio.sleep(min(probe.get("initialDelaySeconds", 0), longest_period_s))
    tally = Tally(
        success_threshold=probe.get("successThreshold", 1),
        failure_threshold=probe.get("failureThreshold", 3),
    )
    while True:
        verdict = tally.count(success=await ask(probe, target))
        if verdict is not None:
            yield verdict
        await asyncio.sleep(min(probe.get("periodSeconds", 10), longest_period_s))
