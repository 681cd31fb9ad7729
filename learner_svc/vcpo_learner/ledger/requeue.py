"""Prompts owed: granted once and not answered, with what was sampled for them.

An answer that was begun belongs to its prompt and to no lease. It is not a trajectory, so it stands
nowhere in the accounting: the grant it was sampled for is dropped, the next grant goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from vcpo.wire.trajectory import PartialResponse, partial_from_message, partial_to_message
from vcpo.wire.v1 import ledger_pb2, work_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeuedPrompt:
    """A prompt to be granted again, before new ones."""

    prompt_index: int
    attempts: int = 0
    """Times that generating its answers failed."""
    begun: tuple[PartialResponse, ...] = ()
    """Answers to go on with, at most one for each trajectory of a grant."""

    @property
    def num_partial_tokens(self) -> int:
        """Tokens of the answers that were begun."""
        return sum(len(one.token_ids) for one in self.begun)

    def without_tokens_before(self, policy_version: int) -> Self:
        """The same without answers that hold a token of an older version."""
        kept = tuple(one for one in self.begun if one.oldest_policy_version >= policy_version)
        return replace(self, begun=kept)


def num_sampled_tokens(begun: Iterable[PartialResponse]) -> int:
    """Tokens of answers that were begun that a policy sampled."""
    return sum(one.num_sampled_tokens for one in begun)


def save_requeued(owed: Iterable[RequeuedPrompt], snapshot: ledger_pb2.LedgerSnapshot) -> None:
    """Write owed prompts into a snapshot; failed attempts are not kept."""
    for place, prompt in enumerate(owed):
        snapshot.requeued_prompt_indices.append(prompt.prompt_index)
        if prompt.begun:
            responses = [partial_to_message(one) for one in prompt.begun]
            snapshot.begun.append(ledger_pb2.BegunGroup(place=place, responses=responses))


def restore_requeued(snapshot: ledger_pb2.LedgerSnapshot) -> list[RequeuedPrompt]:
    """Read the owed prompts of a snapshot, in their order.

    Raises:
        InvalidMessageError: naming the first field that is not as it must be.
    """
    begun = {group.place: _responses(group.responses) for group in snapshot.begun}
    return [
        RequeuedPrompt(prompt_index=prompt_index, begun=begun.get(place, ()))
        for place, prompt_index in enumerate(snapshot.requeued_prompt_indices)
    ]


def _responses(messages: Sequence[work_pb2.PartialResponse]) -> tuple[PartialResponse, ...]:
    return tuple(
        partial_from_message(message, path=f"begun[].responses[{index}]")
        for index, message in enumerate(messages)
    )
