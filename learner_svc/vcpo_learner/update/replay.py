r"""Answers that may be trained on again, per prompt, and how a group is drawn from them.

An objective that is valid off policy without importance weights (trajectory balance) need not throw
an answer away once it was used. Kept are the latest answers to a prompt, each sequence of tokens
once. A group is drawn one answer at a time, without putting back:

    with probability q          uniformly among the answers of the most recent policy version,
    otherwise                   with probability proportional to exp(R / T) among all of them.

Once the most recent are all drawn the reward decides alone: a group is as large as was asked for,
unless the prompt has fewer answers. An answer is as recent as the oldest of its tokens.

Source: TBA, "Trajectory Balance with Asynchrony", arXiv 2503.18929 (the two draws). An answer there
is as recent as the searchers' last synchronization; here versions say so exactly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vcpo.wire.packing import pack_token_ids
from vcpo.wire.trajectory import FinishReason, TokenSpan, Trajectory, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How much is kept, and how it is drawn."""

    capacity_per_prompt: int = 64
    """Answers kept of one prompt, at least 1; prompts are bounded by the run's pool of them."""
    on_policy_probability: float = 0.95
    """Share of draws from the most recent version, in [0, 1]; the release's."""
    inverse_temperature: float = 1.0
    """1 / T per unit of reward, at least 0; 0 draws all answers alike."""

    def __post_init__(self) -> None:
        if self.capacity_per_prompt < 1:
            raise ValueError(f"capacity_per_prompt is {self.capacity_per_prompt}: give at least 1")
        if not 0.0 <= self.on_policy_probability <= 1.0:
            raise ValueError(
                f"on_policy_probability is {self.on_policy_probability}: give a share in [0, 1]"
            )
        if not 0.0 <= self.inverse_temperature < math.inf:
            raise ValueError(
                f"inverse_temperature is {self.inverse_temperature}: give a number of at least 0"
            )


def keep_newest(
    held: Iterable[Trajectory], arrived: Iterable[Trajectory], capacity: int
) -> tuple[Trajectory, ...]:
    """The newest `capacity` answers of one prompt, newest last, each sequence of tokens once.

    Of two answers with the same response tokens the one that arrived later stays: its
    log-probabilities and version are those of the later policy.
    """
    latest: dict[bytes, Trajectory] = {}
    for trajectory in (*held, *arrived):
        response = pack_token_ids(trajectory.response_token_ids)
        latest.pop(response, None)  # so that the later one moves to the end
        latest[response] = trajectory
    return tuple(latest.values())[-capacity:]


def draw(
    held: Sequence[Trajectory], count: int, settings: ReplaySettings, rng: random.Random
) -> list[Trajectory]:
    """Draw `count` different answers of one prompt, or all of them when there are fewer."""
    newest = max((each.oldest_policy_version for each in held), default=0)
    remaining = list(held)
    group: list[Trajectory] = []
    while remaining and len(group) < count:
        recent = [
            position
            for position, each in enumerate(remaining)
            if each.oldest_policy_version == newest
        ]
        if recent and rng.random() < settings.on_policy_probability:
            position = rng.choice(recent)
        else:
            weights = reward_weights([each.reward for each in remaining], settings)
            (position,) = rng.choices(range(len(remaining)), weights)
        group.append(remaining.pop(position))
    return group


def reward_weights(rewards: Sequence[float], settings: ReplaySettings) -> list[float]:
    """exp(R / T) of each reward over the largest of them, in [0, 1]; no reward overflows it."""
    largest = max(rewards)
    return [math.exp((reward - largest) * settings.inverse_temperature) for reward in rewards]


class ReplayBuffer:
    """The answers kept of every prompt; prompts of the same tokens are one. Owner: the update."""

    def __init__(self, settings: ReplaySettings, *, seed: int) -> None:
        self._settings = settings
        self._rng = random.Random(seed)  # noqa: S311 - no secret
        self._held: dict[bytes, tuple[Trajectory, ...]] = {}
        """By the packed tokens of the prompt."""

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def held(self, prompt_token_ids: Sequence[int]) -> tuple[Trajectory, ...]:
        """Responses kept of a prompt, newest last."""
        return self._held.get(pack_token_ids(prompt_token_ids), ())

    def add(self, arrived: Sequence[Trajectory]) -> None:
        """Keep answers to one prompt, at least one; the oldest beyond its capacity go."""
        prompt = pack_token_ids(arrived[0].prompt_token_ids)
        held = self._held.get(prompt, ())
        self._held[prompt] = keep_newest(held, arrived, self._settings.capacity_per_prompt)

    def remove(self, lease_ids: Collection[str]) -> dict[str, tuple[Trajectory, ...]]:
        """Forget the answers to these leases, and return what was kept of each."""
        removed: dict[str, tuple[Trajectory, ...]] = {}
        remaining: dict[bytes, tuple[Trajectory, ...]] = {}
        for prompt, held in self._held.items():
            for each in held:
                if each.lease_id in lease_ids:
                    removed[each.lease_id] = (*removed.get(each.lease_id, ()), each)
                else:
                    remaining[prompt] = (*remaining.get(prompt, ()), each)
        self._held = remaining
        return removed

    def exchange(self, groups: Iterable[Sequence[Trajectory]]) -> list[list[Trajectory]]:
        """Keep the groups that arrived, and draw as large ones to train on in their place.

        A prompt with fewer different answers than that gets a smaller group. What is drawn stays.
        """
        groups_drawn = []
        for group in groups:
            self.add(group)
            held = self.held(group[0].prompt_token_ids)
            groups_drawn.append(draw(held, len(group), self._settings, self._rng))
        return groups_drawn

    def state_dict(self) -> dict[str, Any]:
        """All that further draws depend on, as plain values."""
        held = [[_trajectory_to_dict(each) for each in group] for group in self._held.values()]
        return {"held": held, "generator": self._rng.getstate()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; with a smaller capacity the newest answers stay."""
        self._held = {}
        for group in state["held"]:
            self.add([_trajectory_from_dict(each) for each in group])
        version, words, spare = state["generator"]
        self._rng.setstate((version, tuple(words), spare))


def _trajectory_to_dict(trajectory: Trajectory) -> dict[str, Any]:
    return {
        **asdict(trajectory),
        "prompt_token_ids": tuple(trajectory.prompt_token_ids),
        "response_token_ids": tuple(trajectory.response_token_ids),
        "rollout_logprobs": tuple(trajectory.rollout_logprobs),
        "finish_reason": trajectory.finish_reason.value,
    }


def _trajectory_from_dict(fields: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        trajectory_id=fields["trajectory_id"],
        prompt_token_ids=tuple(fields["prompt_token_ids"]),
        response_token_ids=tuple(fields["response_token_ids"]),
        rollout_logprobs=tuple(fields["rollout_logprobs"]),
        version_spans=tuple(VersionSpan(**span) for span in fields["version_spans"]),
        reward=fields["reward"],
        finish_reason=FinishReason(fields["finish_reason"]),
        # What was saved before there were any has none.
        inserted_spans=tuple(TokenSpan(**span) for span in fields.get("inserted_spans", ())),
    )
