"""The hardware that the runs are paced by, and the fastest that it lets a run be."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

GROUPS: Final = 4
"""Groups of one step."""
GROUP_SIZE: Final = 8
"""Responses of one group."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """How long decoding, training and publishing take."""

    lengths: Lengths
    """Lengths of responses, in tokens."""
    decoding_step_s: float
    """Seconds that a worker takes for one token of all its responses."""
    learner_step_s: float
    worker_groups: int
    """Groups that a worker generates at a time."""
    publication_s: float = 0.0
    """Seconds beside the next step until workers hear of a version."""

    def faster(self, factor: float) -> Hardware:
        """Return hardware that takes `factor` times less for everything."""
        return replace(
            self,
            decoding_step_s=self.decoding_step_s / factor,
            learner_step_s=self.learner_step_s / factor,
            publication_s=self.publication_s / factor,
        )

    def longest_s(self, responses: int) -> float:
        return self.lengths.expected_longest(responses) * self.decoding_step_s

    def synchronous_step_s(self) -> float:
        """Return the least time of a step that waits for its own batch, if all of it has a place.

        The longest response of the batch is generated, and then the learner takes its step.
        """
        return self.longest_s(GROUPS * GROUP_SIZE) + self.learner_step_s

    def asynchronous_step_s(self, workers: int) -> float:
        """Return the least time of a step of which no side waits for the other.

        A group holds its place until its longest response ends. All places together generate
        GROUPS groups a step; the learner trains meanwhile.
        """
        batches_at_once = workers * self.worker_groups / GROUPS
        return max(self.learner_step_s, self.longest_s(GROUP_SIZE) / batches_at_once)


REFERENCE: Final = Hardware(
    lengths=Lengths(median=512.0, sigma=1.0, most=8192),
    decoding_step_s=0.02,
    learner_step_s=25.0,
    worker_groups=3,
)
"""Workers with a model of some billion parameters that reasons: 20 ms a token; responses of 512
tokens (median), one in 20 above 2,650, cut at 8,192; 24 of them at a time. Two workers generate a
batch in 34 s, which is too long for a learner that takes 25 s, and six in 11 s.
"""
