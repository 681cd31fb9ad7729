r"""A small network that tells from a prompt's text how much there is to learn from it.

A group's gradient grows with the spread sqrt(p (1 - p)) of its rewards, p the prompt's success
rate, and

    f(q) = 1/2 sigmoid(w . mean_t Embed(q_t))

is fitted to that spread: both lie in [0, 1/2]. Unlike counts per prompt (`posterior`)
it has an opinion on prompts that nobody has answered yet. The policy changes, so it learns from the
latest observations only.

Source: Goldilocks RL, arXiv 2602.14868 (teacher, target, MSE on a sliding window). Embed is a small
table that is learned from nothing; its width, the learning rate, the window and the exploration are
this project's.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings:
    """Size of the network and of what it learns from."""

    embedding_size: int = 64
    """Width of a token's embedding, at least 1."""
    learning_rate: float = 1e-2
    """AdamW's, above 0; embeddings of rare tokens move in few of the steps, hence not small."""
    window: int = 4096
    """Latest observations that are kept, at least 1; older ones tell of a policy that is gone."""
    batch_size: int = 64
    """Observations per step, drawn with replacement, at least 1."""
    exploration: float = 0.1
    """Share of choices that are made uniformly, in [0, 1]."""

    def __post_init__(self) -> None:
        for field in ("embedding_size", "window", "batch_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: give at least 1")
        if not 0.0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}: give a number above 0")
        if not 0.0 <= self.exploration <= 1.0:
            raise ValueError(f"exploration is {self.exploration}: give a share in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A prompt, and how undecided its answers were."""

    prompt_token_ids: tuple[int, ...]
    undecidedness: float
    """sqrt(p (1 - p)), in [0, 1/2]."""


def undecidedness(successes: float, trials: int) -> float:
    """sqrt(p (1 - p)) of p = successes / trials: 0 when all answers agree, 1/2 at an even split.

    successes: in [0, trials]; rewards between 0 and 1 may make it a fraction.
    Raises: ValueError when there is no trial, or successes is outside its range.
    """
    if trials < 1:
        raise ValueError(f"trials is {trials}: a success rate needs at least 1")
    if not 0.0 <= successes <= trials:
        raise ValueError(f"successes is {successes}: give a number in [0, {trials}], the trials")
    rate = successes / trials
    return math.sqrt(rate * (1.0 - rate))


class PromptTeacher:
    """The network, its window of observations and its optimizer, on the CPU.

    Everything random in it comes from `seed`; what a choice explores comes from the caller.
    """

    def __init__(self, settings: TeacherSettings, *, vocabulary_size: int, seed: int) -> None:
        self._settings = settings
        self._generator = torch.Generator().manual_seed(seed)
        self._network = _Network(vocabulary_size, settings.embedding_size, self._generator)
        self._optimizer = torch.optim.AdamW(
            self._network.parameters(), lr=settings.learning_rate, weight_decay=0.0
        )
        self._window: deque[Observation] = deque(maxlen=settings.window)

    def observe(self, prompt_token_ids: Sequence[int], successes: float, trials: int) -> None:
        """Note how a prompt's answers turned out; `train_step` learns from it.

        Raises: ValueError as `undecidedness`, or when a token is not of the vocabulary.
        """
        self._network.require_prompt(prompt_token_ids)
        target = undecidedness(successes, trials)
        self._window.append(
            Observation(prompt_token_ids=tuple(prompt_token_ids), undecidedness=target)
        )

    def train_step(self) -> float:
        """Take one step on a draw from the window; returns its mean squared error before the step.

        Raises: ValueError when nothing was observed.
        """
        if not self._window:
            raise ValueError("nothing was observed: call observe() before train_step()")
        draws = torch.randint(
            len(self._window), (self._settings.batch_size,), generator=self._generator
        ).tolist()
        batch = [self._window[draw] for draw in draws]
        targets = torch.tensor([each.undecidedness for each in batch])
        error = functional.mse_loss(
            self._network([each.prompt_token_ids for each in batch]), targets
        )
        self._optimizer.zero_grad()
        torch.autograd.backward(error)
        self._optimizer.step()
        return error.item()

    def scores(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """What f gives each prompt [num_prompts][tokens], in (0, 1/2); more is more to learn from.

        Raises: ValueError when a prompt is empty, or a token is not of the vocabulary.
        """
        if not prompts:
            return []
        for prompt in prompts:
            self._network.require_prompt(prompt)
        with torch.no_grad():
            scores: list[float] = self._network(prompts).tolist()
        return scores

    def choose(self, prompts: Sequence[Sequence[int]], rng: random.Random) -> int:
        """Position in `prompts` of the one to train on next: the highest score, now and then any.

        Of equal scores the first wins, so give the prompts in no particular order.
        Raises: ValueError when there is no prompt, and as `scores`.
        """
        if not prompts:
            raise ValueError("prompts is empty: give at least one")
        if rng.random() < self._settings.exploration:
            return rng.randrange(len(prompts))
        scores = self.scores(prompts)
        return max(range(len(scores)), key=scores.__getitem__)

    def state_dict(self) -> dict[str, Any]:
        """Network, optimizer, window and generator, for a checkpoint."""
        return {
            "network": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "window": [(list(each.prompt_token_ids), each.undecidedness) for each in self._window],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict` of the same vocabulary and width."""
        self._network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self._window.clear()
        self._window.extend(
            Observation(prompt_token_ids=tuple(tokens), undecidedness=target)
            for tokens, target in state["window"]
        )


class _Network(nn.Module):
    """f, over a batch of prompts of any lengths."""

    def __init__(
        self, vocabulary_size: int, embedding_size: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        # Unit scale keeps the mean of a short prompt well apart from that of another.
        table = torch.randn(vocabulary_size, embedding_size, generator=generator)
        self.embedding = nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="mean")
        # Every prompt scores 1/4 until something was learned.
        self.weight = nn.Parameter(torch.zeros(embedding_size))

    def forward(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Scores [num_prompts] of prompts [num_prompts][tokens]."""
        token_ids = torch.tensor([token for prompt in prompts for token in prompt])
        lengths = torch.tensor([0, *(len(prompt) for prompt in prompts[:-1])])
        pooled: Tensor = self.embedding(token_ids, lengths.cumsum(0))
        return 0.5 * torch.sigmoid(pooled @ self.weight)

    def require_prompt(self, token_ids: Sequence[int]) -> None:
        """Refuse a prompt that has no mean embedding.

        Raises: ValueError when it is empty, or a token is not of the vocabulary.
        """
        if not token_ids:
            raise ValueError("prompt_token_ids is empty: a prompt has at least one token")
        size = self.embedding.num_embeddings
        for token in token_ids:
            if not 0 <= token < size:
                raise ValueError(f"prompt_token_ids has {token}: the vocabulary ends at {size - 1}")
