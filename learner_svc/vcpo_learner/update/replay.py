r"""The replay buffer: responses to each prompt that may be trained on again.

An objective that is valid off policy without importance weights (trajectory balance) can use a
response more than once. A group is drawn one response at a time, without replacement:

    with probability q          uniformly among the responses of the most recent policy version,
    otherwise                   with probability proportional to exp(R / T) among all of them.

When the most recent responses are all drawn, the reward alone decides.

Source: TBA, "Trajectory Balance with Asynchrony", arXiv 2503.18929 (the two draws). There the age
of a response is that of the searchers' last synchronization; here it is exact, by version.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vcpo.api import VCPORunSpec
from vcpo.wire.packing import pack_token_ids
from vcpo.wire.trajectory import FinishReason, TokenSpan, Trajectory, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Capacity and draws of a replay buffer."""

    capacity_per_prompt: int = 64
    """Responses kept of one prompt, at least 1."""
    on_policy_probability: float = 0.95
    """Share of draws from the most recent version, in [0, 1]; the default is the release's."""
    inverse_temperature: float = 1.0
    """1 / T per unit of reward, at least 0; 0 draws all responses with equal probability."""

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
    """Return the newest `capacity` responses of one prompt, newest last, each token sequence once.

    Of two equal token sequences the one that arrived later stays: its log-probabilities and version
    are those of the later policy.
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
    """Draw `count` different responses of one prompt, or all of them if there are fewer."""
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
    """Return exp(R / T) of each reward, divided by the largest, in [0, 1]."""
    largest = max(rewards)
    return [math.exp((reward - largest) * settings.inverse_temperature) for reward in rewards]


class ReplayBuffer:
    """Keeps responses by prompt; prompts with the same tokens are one. Owner: the update."""

    def __init__(self, settings: ReplaySettings, *, seed: int) -> None:
        self._settings = settings
        self._rng = random.Random(seed)  # noqa: S311 - no secret
        self._held: dict[bytes, tuple[Trajectory, ...]] = {}
        """Responses by the packed tokens of their prompt, newest last."""

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def responses_to(self, prompt_token_ids: Sequence[int]) -> tuple[Trajectory, ...]:
        return self._held.get(pack_token_ids(prompt_token_ids), ())

    def add(self, arrived: Sequence[Trajectory]) -> None:
        """Add responses to one prompt, at least one; discard the oldest beyond the capacity."""
        prompt = pack_token_ids(arrived[0].prompt_token_ids)
        held = self._held.get(prompt, ())
        self._held[prompt] = keep_newest(held, arrived, self._settings.capacity_per_prompt)

    def exchange(self, groups: Iterable[Sequence[Trajectory]]) -> list[list[Trajectory]]:
        """Add the groups that arrived, and draw groups of the same sizes to train on.

        A prompt with fewer different responses gets a smaller group. Drawn responses stay.
        """
        groups_drawn = []
        for group in groups:
            self.add(group)
            held = self.responses_to(group[0].prompt_token_ids)
            groups_drawn.append(draw(held, len(group), self._settings, self._rng))
        return groups_drawn

    def state_dict(self) -> dict[str, Any]:
        held = [[_trajectory_to_dict(each) for each in group] for group in self._held.values()]
        return {"held": held, "generator": self._rng.getstate()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; with a smaller capacity the newest responses stay."""
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
        "expert_routes": None,  # of an older policy than any that draws it
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
        inserted_spans=tuple(TokenSpan(**span) for span in fields["inserted_spans"]),
        worker_id=fields["worker_id"],
    )


def replay_buffer(spec: VCPORunSpec) -> ReplayBuffer | None:
    """Return the run's replay buffer; None if it trains on what arrives."""
    probability = spec.algorithm.on_policy_probability
    if probability is None:
        return None
    return ReplayBuffer(ReplaySettings(on_policy_probability=probability), seed=spec.seed)
