"""One simulated worker: its places, the version that it holds, and who sampled which token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulate.ledger import GeneratedGroup
from benchmarks.simulate.system import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGroup:
    """A group from its grant to its last token; times are of the worker's decoding clock."""

    grant_number: int
    lengths: Sequence[int]
    """Tokens of each response."""
    started_s: float
    ends_s: float
    """When the longest response ends."""


class Worker:
    """A worker that decodes all its responses at one pace.

    Its decoding clock stands still while the engine is paused for a swap.
    """

    def __init__(self, name: str, generation: Generation) -> None:
        self.name = name
        self.held_version = 0
        self.free_places = generation.places
        self._generation = generation
        self._paused_s = 0.0
        """All pauses together, the present one included."""
        self._swaps = [(0.0, 0)]
        """Pairs of decoding time and the version that samples from then on."""
        self._started_s: dict[int, float] = {}
        """Of the running groups, by grant."""

    def decoding_time_s(self, now_s: float) -> float:
        """Return the time of the decoding clock."""
        return max(now_s - self._paused_s, self._swaps[-1][0])

    def start(self, grant_number: int, lengths: Sequence[int], now_s: float) -> RunningGroup:
        """Begin a group."""
        self.free_places -= len(lengths)
        started_s = self._started_s[grant_number] = self.decoding_time_s(now_s)
        ends_s = started_s + max(lengths) * self._generation.token_s
        return RunningGroup(
            grant_number=grant_number, lengths=lengths, started_s=started_s, ends_s=ends_s
        )

    def generated(self, group: RunningGroup) -> GeneratedGroup:
        """Return what was sampled for a group that has ended; its places stay taken."""
        del self._started_s[group.grant_number]
        begun = self._tokens_begun(group.started_s)
        if not self._generation.swaps_in_flight:
            begun = [(begun[0][0], math.inf)]
        return GeneratedGroup(size=len(group.lengths), spans=_spans(begun, group.lengths))

    def swap(self, policy_version: int, now_s: float, pause_s: float) -> None:
        """Use a version from now on, after a pause."""
        swapped_s = self.decoding_time_s(now_s)
        self.held_version = policy_version
        self._swaps.append((swapped_s, policy_version))
        self._paused_s = now_s + pause_s - swapped_s
        oldest_s = min(self._started_s.values(), default=swapped_s)
        while len(self._swaps) > 1 and self._swaps[1][0] <= oldest_s:
            del self._swaps[0]

    def _tokens_begun(self, started_s: float) -> list[tuple[int, float]]:
        """Return each version that sampled since a time, with the tokens begun until its end.

        A token that is under way at a swap belongs to the version before.
        """
        ended = [*(time for time, _ in self._swaps[1:]), math.inf]
        return [
            (version, (until_s - started_s) / self._generation.token_s)
            for (_, version), until_s in zip(self._swaps, ended, strict=True)
            if until_s > started_s
        ]


def _spans(
    begun: Sequence[tuple[int, float]], lengths: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return pairs of version and tokens of responses that began together.

    begun: versions, each with the tokens that any response has by its end; infinite for the last.
    lengths: tokens of each response.
    """
    spans, counted = [], 0
    for version, tokens in begun:
        ended = math.ceil(tokens) if tokens < math.inf else None
        total = sum(lengths) if ended is None else sum(min(ended, each) for each in lengths)
        if total > counted:
            spans.append((version, total - counted))
        counted = total
    return tuple(spans)
