"""Which groups are granted, dropped and trained on: the product's rules, on simulated groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vcpo.control.admission import admissible_trajectories
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.lease_book import GroupBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedGroup:
    """The responses to one prompt, which begin together, and what the rules read of each."""

    size: int
    """Responses."""
    spans: tuple[tuple[int, int], ...]
    """Pairs of policy version and tokens that it sampled for all of them, oldest first, not
    empty."""

    @property
    def oldest_policy_version(self) -> int:
        """Version of the first token of every response."""
        return self.spans[0][0]


class Ledger:
    """Counts of trajectories, and the groups that wait for a step."""

    def __init__(
        self, *, prompts_per_step: int, group_size: int, max_policy_lag_steps: int
    ) -> None:
        self.num_dropped = 0
        """Trajectories that were too old."""
        self._batch = prompts_per_step * group_size
        self._group_size = group_size
        self._max_policy_lag_steps = max_policy_lag_steps
        self._buffer = GroupBuffer(prompts_per_step=prompts_per_step)
        self._in_flight = 0
        self._consumed = 0
        self._num_granted = 0

    def is_admissible(self, held_version: int) -> bool:
        """Return whether a worker that holds a version may be granted a group."""
        return self._admissible(held_version) >= self._group_size

    def grant(self, *, held_version: int, free_places: int) -> list[int]:
        """Grant a worker the groups that it has places for; return the numbers of the grants."""
        most = min(self._admissible(held_version), free_places)
        first = self._num_granted
        self._num_granted += most // self._group_size
        granted = list(range(first, self._num_granted))
        self._in_flight += len(granted) * self._group_size
        return granted

    @property
    def has_batch(self) -> bool:
        """Whether there are enough groups for a step."""
        return self._buffer.num_trajectories >= self._batch

    def accept(self, grant_number: int, generated: GeneratedGroup) -> bool:
        """Buffer a group; return whether one is dropped, so that more may be granted."""
        # The rules count trajectories and ask each for its oldest version.
        members: Any = dict.fromkeys(range(generated.size), generated)
        group = Lease(
            grant_number=grant_number,
            group_number=grant_number,
            lease_id=str(grant_number),
            worker_id="w",
            prompt_index=grant_number,
            accepted=members,
        )
        self._in_flight -= generated.size
        self._buffer.add([group])
        return self._drop_late()

    def take_batch(self) -> list[GeneratedGroup] | None:
        """Take the groups of the next step; return None if there are too few."""
        self._drop_late()
        batch = self._buffer.take_batch()
        if batch is None:
            return None
        self._consumed += self._batch
        self._drop_late()
        generated: list[Any] = [group.trajectories[0] for group in batch]
        return generated

    def _admissible(self, held_version: int) -> int:
        return admissible_trajectories(
            lag_limit_steps=self._max_policy_lag_steps,
            held_policy_version=held_version,
            batch_trajectories=self._batch,
            accepted=self._buffer.num_trajectories + self._consumed,
            in_flight=self._in_flight,
        )

    def _drop_late(self) -> bool:
        """Drop the groups that no step can take in time, as the learner does at every turn."""
        next_version = self._consumed // self._batch
        late = self._buffer.late(
            policy_version=next_version, max_policy_lag_steps=self._max_policy_lag_steps
        )
        if late:
            self._buffer.remove([group.lease_id for group in late])
            self.num_dropped += sum(len(group.trajectories) for group in late)
        return bool(late)
