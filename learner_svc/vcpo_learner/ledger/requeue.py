"""Requeued prompts: granted before and not completed, with what is left of their responses.

A partial response belongs to its prompt and not to a lease. It is not a trajectory, so the
accounting does not count it: the old lease is dropped, and the next lease resumes the response.

A kept trajectory was accepted under a lease that ended because the learner stopped. It stays
accepted. The next lease asks for the other members of its group only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from vcpo.wire.trajectory import (
    PartialResponse,
    Trajectory,
    partial_from_message,
    partial_to_message,
    trajectory_from_message,
    trajectory_to_message,
)
from vcpo.wire.v1 import ledger_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeuedPrompt:
    """A prompt whose lease ended early. It is granted again before any new prompt."""

    prompt_index: int
    attempts: int = 0
    """Failed generations of the prompt."""
    partial_responses: tuple[PartialResponse, ...] = ()
    """Responses to resume, at most one for each trajectory of a lease."""
    kept: tuple[Trajectory, ...] = ()
    """Members of its group that were accepted before a restart of the learner."""
    grant_number: int | None = None
    """Its place in the order, which it keeps over a restart of the learner. None after any other
    end of a lease: the prompt goes to the end."""
    group_number: int | None = None
    """Seeds the responses. It is kept if the next lease is to sample the same ones, or the rest of
    them. None if the group was dropped: the next lease samples others."""
    lost_leases: int = 0
    """Leases that ended without a result, perhaps because of the responses themselves. Every second
    one changes the draw. A failed generation counts 2, a restart of the learner 0."""

    @property
    def num_partial_tokens(self) -> int:
        """All tokens of the partial responses, tokens of the environment included."""
        return sum(len(partial.token_ids) for partial in self.partial_responses)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of the partial responses and the kept trajectories that a policy sampled."""
        begun = sum(partial.num_sampled_tokens for partial in self.partial_responses)
        return begun + sum(trajectory.num_sampled_tokens for trajectory in self.kept)

    def without_tokens_before(self, policy_version: int) -> Self:
        """Return the prompt without responses that hold a token of an older version."""
        return replace(
            self,
            partial_responses=tuple(
                each
                for each in self.partial_responses
                if each.oldest_policy_version >= policy_version
            ),
            kept=tuple(each for each in self.kept if each.oldest_policy_version >= policy_version),
        )

    def without_tokens_after(self, policy_version: int) -> Self:
        """Return the prompt without responses that hold a token of a newer version."""
        return replace(
            self,
            partial_responses=tuple(
                each
                for each in self.partial_responses
                if each.newest_policy_version <= policy_version
            ),
            kept=tuple(each for each in self.kept if each.newest_policy_version <= policy_version),
        )


def requeued_to_message(prompt: RequeuedPrompt) -> ledger_pb2.RequeuedPrompt:
    """Write a requeued prompt for a checkpoint."""
    return ledger_pb2.RequeuedPrompt(
        prompt_index=prompt.prompt_index,
        attempts=prompt.attempts,
        partial_responses=[partial_to_message(each) for each in prompt.partial_responses],
        kept=[trajectory_to_message(each) for each in prompt.kept],
        grant_number=prompt.grant_number,
        group_number=prompt.group_number,
        lost_leases=prompt.lost_leases,
    )


def requeued_from_message(message: ledger_pb2.RequeuedPrompt) -> RequeuedPrompt:
    """Read a requeued prompt of a checkpoint.

    Raises:
        InvalidMessageError: naming the first invalid field.
    """
    return RequeuedPrompt(
        prompt_index=message.prompt_index,
        attempts=message.attempts,
        partial_responses=tuple(
            partial_from_message(each, path=f"requeued[].partial_responses[{index}]")
            for index, each in enumerate(message.partial_responses)
        ),
        kept=tuple(
            trajectory_from_message(each, path=f"requeued[].kept[{index}]")
            for index, each in enumerate(message.kept)
        ),
        grant_number=message.grant_number if message.HasField("grant_number") else None,
        group_number=message.group_number if message.HasField("group_number") else None,
        lost_leases=message.lost_leases,
    )
