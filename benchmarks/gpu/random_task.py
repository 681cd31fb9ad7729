"""A task for models with random parameters: any response has a reward, and no two the same."""

from binascii import crc32
from dataclasses import dataclass

from vcpo_rollout.environments.environment import Prompt, Split

_PROMPT_WORDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTask:
    """Rewards in [0, 1) by the response's checksum, so that every group has a gradient."""

    seed: int

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return words of the tokenizer, other ones for each index."""
        first = crc32(f"{self.seed} {split} {index}".encode()) % 200
        words = (f"w{3 + (first + at) % 200}" for at in range(_PROMPT_WORDS))
        return Prompt(text=" ".join(words), answer="")

    def reward(self, prompt: Prompt, response: str) -> float:
        return crc32(response.encode()) / 2**32
