r"""Which prompt to train on next: the one whose success is the most undecided.

A group's gradient grows with the spread sqrt(p (1 - p)) of its rewards, p the prompt's success
rate: nothing at p = 0 and p = 1, most at p = 1/2. What is known of p is a Beta distribution per
prompt, of the successes and failures seen so far, older ones counting less:

    p ~ Beta(1 + s, 1 + f),    s = sum_i r_i 2^(-age_i / half-life),    f likewise of 1 - r_i,

with age_i in policy versions: the policy that answered then is not the policy that answers now. A
prompt that was never seen, or long ago, has the uniform distribution.

The choice draws one p per candidate and takes the nearest to 1/2 (Thompson sampling). A prompt that
is known to be decided hardly ever wins, and one that is unknown wins often enough to become known.

Source: Goldilocks RL, arXiv 2602.14868 (the principle). The paper trains a network to predict the
spread, as `vcpo_learner.prompts.teacher` does; counts need none, but say nothing of unseen prompts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class PosteriorSettings:
    """How fast to forget, and how often to choose blindly."""

    half_life_versions: float = 32.0
    """Policy versions after which an answer counts half, above 0; infinity never forgets. At the
    default an answer is still worth 4/5 when the next ten steps are over."""
    exploration: float = 0.1
    """Share of choices that are made uniformly, in [0, 1]: a belief that is wrong is found out."""

    def __post_init__(self) -> None:
        if not self.half_life_versions > 0.0:
            raise ValueError(
                f"half_life_versions is {self.half_life_versions}: give a number above 0"
            )
        if not 0.0 <= self.exploration <= 1.0:
            raise ValueError(f"exploration is {self.exploration}: give a share in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Answers to one prompt, each worth what it is at `policy_version`."""

    successes: float = 0.0
    """Sum of rewards, at least 0."""
    failures: float = 0.0
    """Sum of what the rewards lack of 1, at least 0."""
    policy_version: int = 0
    """Version at which an answer counts 1."""

    def at(self, policy_version: int, half_life_versions: float) -> Evidence:
        """The same answers, worth what they are at a version that is not before theirs."""
        share = 2.0 ** ((self.policy_version - policy_version) / half_life_versions)
        return Evidence(
            successes=self.successes * share,
            failures=self.failures * share,
            policy_version=policy_version,
        )


def merge_evidence(one: Evidence, other: Evidence, half_life_versions: float) -> Evidence:
    """Both together, at the later version of the two; their order does not matter."""
    version = max(one.policy_version, other.policy_version)
    first, second = (each.at(version, half_life_versions) for each in (one, other))
    return Evidence(
        successes=first.successes + second.successes,
        failures=first.failures + second.failures,
        policy_version=version,
    )


class PromptPosterior:
    """What is known of the success of each prompt; state is kept of prompts seen only.

    Owner: whoever grants prompts. Two of the same history and generator make the same choices.
    """

    def __init__(self, settings: PosteriorSettings) -> None:
        self._settings = settings
        self._evidence: dict[int, Evidence] = {}
        self._newest_version = 0

    def observe(self, prompt_index: int, rewards: Iterable[float], *, policy_version: int) -> None:
        """Learn from the answers of one version to a prompt.

        rewards: each in [0, 1]; between them a part of a success. Late answers of an older version
        are welcome: they count as if they had come in time.
        Raises: ValueError at a reward outside [0, 1], and then nothing is learned.
        """
        shares = list(rewards)
        for reward in shares:
            if not 0.0 <= reward <= 1.0:
                raise ValueError(
                    f"a reward of prompt {prompt_index} is {reward}: a success rate is counted "
                    "from rewards in [0, 1]; scale them, or train without a curriculum"
                )
        arrived = Evidence(
            successes=math.fsum(shares),
            failures=math.fsum(1.0 - reward for reward in shares),
            policy_version=policy_version,
        )
        known = self._evidence.get(prompt_index)
        half_life = self._settings.half_life_versions
        self._evidence[prompt_index] = (
            arrived if known is None else merge_evidence(known, arrived, half_life)
        )
        self._newest_version = max(self._newest_version, policy_version)

    def evidence(self, prompt_index: int) -> Evidence:
        """What is known of a prompt, worth what it is at the newest version observed."""
        known = self._evidence.get(prompt_index, Evidence())
        return known.at(self._newest_version, self._settings.half_life_versions)

    def choose(self, candidates: Sequence[int], rng: random.Random) -> int:
        """The candidate to train on next: prompt indices in, one of them out.

        Raises: ValueError when there is no candidate.
        """
        if not candidates:
            raise ValueError("candidates is empty: give at least one prompt index")
        if rng.random() < self._settings.exploration:
            return rng.choice(candidates)
        return min(candidates, key=lambda index: abs(self._draw(index, rng) - 0.5))

    def to_dict(self) -> dict[str, Any]:
        """All that was observed, as plain JSON values."""
        prompts = [
            [index, known.successes, known.failures, known.policy_version]
            for index, known in sorted(self._evidence.items())
        ]
        return {"newest_version": self._newest_version, "prompts": prompts}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], settings: PosteriorSettings) -> Self:
        """Go on from a `to_dict`; the settings may be others."""
        posterior = cls(settings)
        posterior._newest_version = int(state["newest_version"])
        posterior._evidence = {
            int(index): Evidence(
                successes=float(successes), failures=float(failures), policy_version=int(version)
            )
            for index, successes, failures, version in state["prompts"]
        }
        return posterior

    def _draw(self, prompt_index: int, rng: random.Random) -> float:
        known = self.evidence(prompt_index)
        return rng.betavariate(1.0 + known.successes, 1.0 + known.failures)
