"""Requeued prompts: granted before and not completed, with their partial responses.

A partial response belongs to its prompt and not to a lease. It is not a trajectory, so the
accounting does not count it: the old lease is dropped, and the next lease resumes the response.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from vcpo.wire.trajectory import PartialResponse, partial_from_message, partial_to_message
from vcpo.wire.v1 import ledger_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeuedPrompt:
    """A prompt that is granted again, before new prompts."""

    prompt_index: int
    attempts: int = 0
    """Failed generations of the prompt."""
    partial_responses: tuple[PartialResponse, ...] = ()
    """Responses to resume, at most one for each trajectory of a lease."""

    @property
    def num_partial_tokens(self) -> int:
        """All tokens of the partial responses, tokens of the environment included."""
        return sum(len(partial.token_ids) for partial in self.partial_responses)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of the partial responses that a policy sampled."""
        return sum(partial.num_sampled_tokens for partial in self.partial_responses)

    def without_tokens_before(self, policy_version: int) -> Self:
        """Return the prompt without the partial responses that hold a token of an older version."""
        kept = tuple(
            partial
            for partial in self.partial_responses
            if partial.oldest_policy_version >= policy_version
        )
        return replace(self, partial_responses=kept)


def save_requeued(prompts: Iterable[RequeuedPrompt], snapshot: ledger_pb2.LedgerSnapshot) -> None:
    """Write requeued prompts into a snapshot, without their failed attempts."""
    for place, prompt in enumerate(prompts):
        snapshot.requeued_prompt_indices.append(prompt.prompt_index)
        if prompt.partial_responses:
            responses = [partial_to_message(partial) for partial in prompt.partial_responses]
            snapshot.begun.append(ledger_pb2.BegunGroup(place=place, responses=responses))


def restore_requeued(snapshot: ledger_pb2.LedgerSnapshot) -> list[RequeuedPrompt]:
    """Read the requeued prompts of a snapshot, in their order.

    Raises:
        InvalidMessageError: naming the first invalid field.
    """
    partial_responses = {
        group.place: tuple(
            partial_from_message(message, path=f"begun[].responses[{index}]")
            for index, message in enumerate(group.responses)
        )
        for group in snapshot.begun
    }
    return [
        RequeuedPrompt(
            prompt_index=prompt_index, partial_responses=partial_responses.get(place, ())
        )
        for place, prompt_index in enumerate(snapshot.requeued_prompt_indices)
    ]
