"""Probes: one request to a container, and the count of results that decides."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.kubelet.environment import JsonObject, UnsupportedPodError

_FINE = range(200, 400)


async def ask(probe: JsonObject, pod_ip: str) -> bool:
    """Put a probe's question once; no answer within its timeout is a no.

    Raises:
        UnsupportedPodError: for kinds of probes that the fake kubelet does not know.
    """
    for kind, question in _QUESTIONS.items():
        if kind in probe:
            try:
                async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
                    return await question(probe[kind], pod_ip)
            except (OSError, TimeoutError, aiohttp.ClientError, grpc.aio.AioRpcError):
                return False
    raise UnsupportedPodError(f"probe: none of {', '.join(_QUESTIONS)} in {sorted(probe)}")


async def _grpc(probe: JsonObject, pod_ip: str) -> bool:
    address = f"{pod_ip}:{probe['port']}"
    direct = (("grpc.enable_http_proxy", 0),)
    async with grpc.aio.insecure_channel(address, options=direct) as channel:
        request = health_pb2.HealthCheckRequest(service=probe.get("service") or "")
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            request, timeout=probe.get("timeoutSeconds", 1)
        )
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _http(probe: JsonObject, pod_ip: str) -> bool:
    url = f"http://{pod_ip}:{probe['port']}{probe.get('path', '/')}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status in _FINE


_QUESTIONS: dict[str, Callable[[JsonObject, str], Awaitable[bool]]] = {
    "grpc": _grpc,
    "httpGet": _http,
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
    probe: JsonObject, pod_ip: str, longest_period_s: float
) -> AsyncGenerator[bool, None]:
    """Ask for ever; yields a verdict with every answer that makes or confirms one."""
    await asyncio.sleep(min(probe.get("initialDelaySeconds", 0), longest_period_s))
    tally = Tally(
        success_threshold=probe.get("successThreshold", 1),
        failure_threshold=probe.get("failureThreshold", 3),
    )
    while True:
        verdict = tally.count(success=await ask(probe, pod_ip))
        if verdict is not None:
            yield verdict
        await asyncio.sleep(min(probe.get("periodSeconds", 10), longest_period_s))
