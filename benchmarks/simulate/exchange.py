"""What a micro-step of a sharded learner computes, and what its ranks exchange meanwhile.

A rank runs its trajectories of G groups. In one pass the sums of the groups leave it, weighted by
offsets and by group: 1 + G sums of the model in float32. In two passes the first one exchanges no
sum, and the second one's gradient leaves as a plain one does: one sum. Both gather the parameters
in bfloat16 for each forward and each backward pass.

A sum that is waited for adds its time to the step. One that is sent beside the backward pass, which
takes three quarters of a pass with layers that are computed again, adds what is longer than that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.simulate import constants
from benchmarks.simulate.cluster import MODELS, OPERATIONS, Model, Workload

_SUM_BYTES: Final = 4
_GATHERED_BYTES: Final = 2
_BACKWARD_SHARE: Final = 0.75

LINKS: Final = {
    "one host": 0.8 * 450e9,
    "hosts, 400 Gbit/s a GPU": 0.8 * 50e9,
    "hosts, 25 Gbit/s": 25e9 / 8 / 8,
}
"""Bytes/s of a rank, each direction: NVLink of an H100 and network cards at 0.8 of their peaks, and
the link of `constants`, which eight GPUs of a host share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """One micro-step of a rank; the ranks have one replica together."""

    model: Model
    link_bytes_per_s: float
    num_groups: int
    tokens: float
    """Of the rank's own trajectories."""

    @property
    def pass_s(self) -> float:
        """Seconds of a forward and a backward pass."""
        return OPERATIONS * self.model.parameters * self.tokens / constants.FLOPS.value

    def one_pass_s(self, *, is_waited_for: bool, sum_bytes: int = _SUM_BYTES) -> float:
        """Return the seconds of a micro-step that exchanges the sums of its groups."""
        sent_s = self._sent_s((1 + self.num_groups) * sum_bytes)
        if is_waited_for:
            return max(self.pass_s, self._gathers_s(2)) + sent_s
        hidden_s = _BACKWARD_SHARE * self.pass_s
        return max(self.pass_s + max(0.0, sent_s - hidden_s), self._gathers_s(2) + sent_s)

    def two_passes_s(self) -> float:
        """Return the seconds of a micro-step that measures first and then forms one sum."""
        return max(2 * self.pass_s, self._gathers_s(4) + self._sent_s(_SUM_BYTES))

    def _gathers_s(self, times: int) -> float:
        return self._sent_s(times * _GATHERED_BYTES)

    def _sent_s(self, bytes_per_parameter: int) -> float:
        """Seconds to send all ranks but one their part of what has so many bytes."""
        ranks = self.model.learner_gpus
        return (
            bytes_per_parameter * self.model.parameters * (ranks - 1) / ranks
        ) / self.link_bytes_per_s


def exchanges(num_groups: int = 3) -> dict[str, dict[str, float]]:
    """Return the seconds of a micro-step of 7 B on 8 ranks, by link and by what is sent when."""
    model, workload = MODELS[0], Workload()
    tokens = num_groups * workload.group_size * workload.lengths.expected_longest(1)
    found: dict[str, dict[str, float]] = {}
    for link, link_bytes_per_s in LINKS.items():
        step = MicroStep(
            model=model,
            link_bytes_per_s=link_bytes_per_s,
            num_groups=num_groups,
            tokens=tokens / model.learner_gpus,
        )
        seconds = {
            "pass": step.pass_s,
            "waited_for": step.one_pass_s(is_waited_for=True),
            "beside": step.one_pass_s(is_waited_for=False),
            "beside_bfloat16": step.one_pass_s(is_waited_for=False, sum_bytes=2),
            "two_passes": step.two_passes_s(),
        }
        found[link] = {name: round(value, 2) for name, value in seconds.items()}
    return found
