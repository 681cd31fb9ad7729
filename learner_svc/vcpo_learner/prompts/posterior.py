r"""Chooses the prompt whose success rate is closest to 1/2, from counts per prompt.

A group's gradient grows with the standard deviation sqrt(p (1 - p)) of its rewards, where p is the
prompt's success rate: it is 0 at p = 0 and p = 1, and largest at p = 1/2. The posterior of p is a
Beta distribution per prompt. It counts the successes and failures so far, older ones less:

    p ~ Beta(1 + s, 1 + f),    s = sum_i r_i 2^(-age_i / half-life),    f likewise of 1 - r_i.

age_i is in policy versions, because the policy changes with every version. A prompt that was never
seen, or only long ago, has the uniform distribution.

A choice draws one p for each candidate and takes the candidate with p closest to 1/2 (Thompson
sampling). A prompt that always succeeds or always fails is rarely chosen. A prompt with few
observations is chosen often enough to be observed.

Source: Goldilocks RL, arXiv 2602.14868 (the principle). The paper trains a network to predict the
standard deviation, as `vcpo_learner.prompts.teacher` does. Counts need no network, but say nothing
about unseen prompts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class PosteriorSettings:
    """How fast observations lose weight, and how often the choice is uniform."""

    half_life_versions: float = 32.0
    """Policy versions after which a response counts half, above 0; infinity never forgets. With the
    default a response still counts 4/5 after ten steps."""
    exploration: float = 0.1
    """Share of choices that are uniform, in [0, 1]; they correct a wrong posterior."""

    def __post_init__(self) -> None:
        if not self.half_life_versions > 0.0:
            raise ValueError(
                f"half_life_versions is {self.half_life_versions}: give a number above 0"
            )
        if not 0.0 <= self.exploration <= 1.0:
            raise ValueError(f"exploration is {self.exploration}: give a share in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Weighted successes and failures of one prompt, with the weights at `policy_version`."""

    successes: float = 0.0
    """Sum of rewards, at least 0."""
    failures: float = 0.0
    """Sum of 1 - reward, at least 0."""
    policy_version: int = 0
    """Version whose responses have weight 1."""

    def at(self, policy_version: int, half_life_versions: float) -> Evidence:
        """Return the same evidence with the weights at a version that is not older."""
        weight = 2.0 ** ((self.policy_version - policy_version) / half_life_versions)
        return Evidence(
            successes=self.successes * weight,
            failures=self.failures * weight,
            policy_version=policy_version,
        )


def merge_evidence(one: Evidence, other: Evidence, half_life_versions: float) -> Evidence:
    """Return the sum of both, with the weights at the newer of their versions."""
    version = max(one.policy_version, other.policy_version)
    first, second = (each.at(version, half_life_versions) for each in (one, other))
    return Evidence(
        successes=first.successes + second.successes,
        failures=first.failures + second.failures,
        policy_version=version,
    )


class PromptPosterior:
    """The posterior of each prompt's success rate; it stores observed prompts only.

    Two posteriors with the same history and random generator make the same choices.
    """

    def __init__(self, settings: PosteriorSettings) -> None:
        self._settings = settings
        self._evidence: dict[int, Evidence] = {}
        self._newest_version = 0

    def observe(self, prompt_index: int, rewards: Iterable[float], *, policy_version: int) -> None:
        """Record the rewards of one version's responses to a prompt.

        Responses of an older version may arrive late; they count with the weight of their version.

        rewards: in [0, 1]; a value between counts as a partial success.

        Raises:
            ValueError: if a reward is outside [0, 1]; nothing is recorded then.
        """
        observed = list(rewards)
        for reward in observed:
            if not 0.0 <= reward <= 1.0:
                raise ValueError(
                    f"a reward of prompt {prompt_index} is {reward}: a success rate is counted "
                    "from rewards in [0, 1]; scale the rewards, or use another promptSelection"
                )
        arrived = Evidence(
            successes=math.fsum(observed),
            failures=math.fsum(1.0 - reward for reward in observed),
            policy_version=policy_version,
        )
        known = self._evidence.get(prompt_index)
        half_life = self._settings.half_life_versions
        self._evidence[prompt_index] = (
            arrived if known is None else merge_evidence(known, arrived, half_life)
        )
        self._newest_version = max(self._newest_version, policy_version)

    def evidence(self, prompt_index: int) -> Evidence:
        """Return a prompt's evidence, with the weights at the newest observed version."""
        known = self._evidence.get(prompt_index, Evidence())
        return known.at(self._newest_version, self._settings.half_life_versions)

    def choose(self, candidates: Sequence[int], rng: random.Random) -> int:
        """Return one of the candidates, which are prompt indices.

        Raises:
            ValueError: if there is no candidate.
        """
        if not candidates:
            raise ValueError("candidates is empty: give at least one prompt index")
        if rng.random() < self._settings.exploration:
            return rng.choice(candidates)

        def distance(index: int) -> float:
            evidence = self.evidence(index)
            return abs(rng.betavariate(1.0 + evidence.successes, 1.0 + evidence.failures) - 0.5)

        return min(candidates, key=distance)

    def to_dict(self) -> dict[str, Any]:
        """Return all observations as plain JSON values."""
        prompts = [
            [index, known.successes, known.failures, known.policy_version]
            for index, known in sorted(self._evidence.items())
        ]
        return {"newest_version": self._newest_version, "prompts": prompts}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], settings: PosteriorSettings) -> Self:
        """Restore a posterior from `to_dict`; the settings may differ."""
        posterior = cls(settings)
        posterior._newest_version = int(state["newest_version"])
        posterior._evidence = {
            int(index): Evidence(
                successes=float(successes), failures=float(failures), policy_version=int(version)
            )
            for index, successes, failures, version in state["prompts"]
        }
        return posterior
