"""A task of two turns: it asks, and whatever the model answers, it asks once more."""

from __future__ import annotations

from dataclasses import dataclass

from vcpo_rollout.environments import Prompt, Split

REPLY = "21="


@dataclass(frozen=True, kw_only=True)
class Echo:
    seed: int

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(text=f"{index % 10}{(index + self.seed) % 10}=", answer="")

    def reward(self, prompt: Prompt, response: str) -> float:
        raise AssertionError("its responses have two turns")

    def converse(self, prompt: Prompt) -> EchoConversation:
        return EchoConversation()


class EchoConversation:
    def __init__(self) -> None:
        self._turns: list[str] = []

    def next_turn(self, response: str) -> str | None:
        self._turns.append(response)
        return REPLY if len(self._turns) == 1 else None

    def reward(self) -> float:
        return float(self._turns[-1] == self._turns[0])
