"""A fake engine whose decoding steps take a given time and whose responses have given lengths.

It serves to measure what is around an engine. The time of a step and the lengths matter; the
sampled tokens do not.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import (
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
    PolicyWeights,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Log-normal lengths of responses, in tokens."""

    median: float
    sigma: float
    """Standard deviation of the logarithm, above 0."""
    most: int

    def draw(self, rng: random.Random, above: int) -> int:
        """Draw a length above `above` and at most `most`."""
        normal = NormalDist(math.log(self.median), self.sigma)
        least = normal.cdf(math.log(above)) if above else 0.0
        share = least + (1.0 - least) * rng.random()
        drawn = math.exp(normal.inv_cdf(share)) if 0.0 < share < 1.0 else float(self.most)
        return max(above + 1, min(math.ceil(drawn), self.most))

    def expected_longest(self, count: int) -> float:
        """Return the mean of the longest of `count` lengths: the sum over x >= 0 of P(some > x)."""
        normal = NormalDist(math.log(self.median), self.sigma)
        at_most = (normal.cdf(math.log(length)) for length in range(1, self.most))
        return 1.0 + sum(1.0 - share**count for share in at_most)


@dataclass(slots=True, kw_only=True, eq=False)
class _Response:
    length: int
    spans: list[tuple[int, int]]
    """Pairs of version and tokens."""
    interrupt: asyncio.Event
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_tokens(self) -> int:
        return sum(size for _, size in self.spans)

    def sample(self, policy_version: int) -> None:
        if self.spans and self.spans[-1][0] == policy_version:
            self.spans[-1] = (policy_version, self.spans[-1][1] + 1)
        else:
            self.spans.append((policy_version, 1))
        if self.num_tokens >= self.length:
            self.ended.set()

    def parts(self) -> dict[str, Any]:
        size = self.num_tokens
        spans = (VersionSpan(policy_version=one, num_tokens=each) for one, each in self.spans)
        return {"token_ids": (1,) * size, "logprobs": (-1.0,) * size, "version_spans": tuple(spans)}


class TimedEngine:
    """An `Engine` whose steps take a given time."""

    end_token_ids: frozenset[int] = frozenset()
    stop_strings = None

    def __init__(self, lengths: Lengths, *, step_s: float, sequence_s: float, seed: int) -> None:
        self.policy_version: int | None = None
        self.num_sampled = 0
        self._lengths = lengths
        self._step_s = step_s
        self._sequence_s = sequence_s
        self._rng = random.Random(seed)  # noqa: S311 - no secret
        self._responses: list[_Response] = []
        self._some = asyncio.Event()

    async def run(self) -> None:
        """Decode for ever; a step that starts late is shorter by the delay."""
        due_s = time.perf_counter()
        while True:
            if not self._responses:
                self._some.clear()
                await self._some.wait()
                due_s = time.perf_counter()
            due_s += self._step_s + self._sequence_s * len(self._responses)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            self.step()

    def step(self) -> None:
        """Sample a token for each sequence; end complete and interrupted ones."""
        assert self.policy_version is not None
        for response in self._responses:
            if not response.interrupt.is_set():
                response.sample(self.policy_version)
                self.num_sampled += 1
        for response in self._responses:
            if response.interrupt.is_set():
                response.ended.set()
        self._responses = [response for response in self._responses if not response.ended.is_set()]

    async def generate(
        self, request: GenerationRequest, *, interrupt: asyncio.Event | None = None
    ) -> Generation:
        """Sample one sequence, as `Engine.generate`."""
        partial = request.partial_response.version_spans if request.partial_response else ()
        spans = [(span.policy_version, span.num_tokens) for span in partial]
        above = sum(size for _, size in spans)
        length = self._lengths.draw(self._rng, above)
        response = _Response(length=length, spans=spans, interrupt=interrupt or asyncio.Event())
        self._responses.append(response)
        self._some.set()
        try:
            await response.ended.wait()
        finally:
            if response in self._responses:
                self._responses.remove(response)
        if response.num_tokens >= length:
            return Generation(**response.parts(), finish_reason=FinishReason.STOP)
        raise GenerationInterruptedError(
            PartialResponse(**response.parts()) if response.spans else None
        )

    async def swap_weights(self, weights: PolicyWeights) -> int:
        self.policy_version = weights.policy_version
        return len(self._responses)

    async def close(self) -> None:
        """Do nothing."""
