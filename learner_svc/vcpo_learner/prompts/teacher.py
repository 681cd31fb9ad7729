r"""A small network that predicts from a prompt's tokens how much there is to learn from it.

A group's gradient grows with the standard deviation sqrt(p (1 - p)) of its rewards, where p is the
prompt's success rate. The network

    f(q) = 1/2 sigmoid(w . mean_t Embed(q_t))

is fitted to it; both are in [0, 1/2]. It also scores prompts that have no response yet.
It learns from the latest observations only, because the policy changes.

Source: Goldilocks RL, arXiv 2602.14868 (teacher, target, MSE on a sliding window). Embed is a small
table, trained from a random start.
"""

import io
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
    """Size of the network, and of the observations it learns from."""

    embedding_size: int = 64
    """Width of a token's embedding, at least 1."""
    learning_rate: float = 1e-2
    """Learning rate of AdamW, above 0. It is not small, because few steps change the embedding of a
    rare token."""
    window: int = 4096
    """Latest observations that are kept, at least 1; older ones are of an outdated policy."""
    batch_size: int = 64
    """Observations per step, drawn with replacement, at least 1."""
    exploration: float = 0.1
    """Share of choices that are uniform, in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A prompt, and the standard deviation of its rewards."""

    prompt_token_ids: tuple[int, ...]
    undecidedness: float
    """sqrt(p (1 - p)), in [0, 1/2]."""


def undecidedness(successes: float, trials: int) -> float:
    """Return sqrt(p (1 - p)) with p = successes / trials: 0 if all agree, 1/2 for an even split.

    successes: in [0, trials]; a fraction if rewards are between 0 and 1. trials: at least 1.
    """
    rate = successes / trials
    return math.sqrt(rate * (1.0 - rate))


class PromptTeacher:
    """The network, its optimizer and its window of observations, on the CPU.

    The network's start and its batches are drawn from `seed`; the caller's generator makes the
    uniform choices.
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
        """Record the outcome of a prompt; `train_step` learns from it."""
        target = undecidedness(successes, trials)
        self._window.append(
            Observation(prompt_token_ids=tuple(prompt_token_ids), undecidedness=target)
        )

    def train_step(self) -> float:
        """Take one step on a batch from the window; return its squared error before it."""
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
        """Return f of each prompt [num_prompts][tokens], in (0, 1/2); higher has more to learn."""
        with torch.no_grad():
            scores: list[float] = self._network(prompts).tolist()
        return scores

    def choose(self, prompts: Sequence[Sequence[int]], rng: random.Random) -> int:
        """Return the position of the prompt with the highest score, or sometimes of a random one.

        The first of equal scores wins, so the caller should give the prompts in random order.
        """
        if rng.random() < self._settings.exploration:
            return rng.randrange(len(prompts))
        scores = self.scores(prompts)
        return max(range(len(scores)), key=scores.__getitem__)

    def state_dict(self) -> dict[str, Any]:
        """Return network, optimizer, window and generator, for a checkpoint."""
        return {
            "network": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "window": [(list(each.prompt_token_ids), each.undecidedness) for each in self._window],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self._window.clear()
        self._window.extend(
            Observation(prompt_token_ids=tuple(tokens), undecidedness=target)
            for tokens, target in state["window"]
        )


def state_to_bytes(state: Mapping[str, Any]) -> bytes:
    """Write a state with tensors in torch's format."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def state_from_bytes(data: bytes) -> dict[str, Any]:
    """Read what `state_to_bytes` wrote."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


class _Network(nn.Module):
    """f for a batch of prompts of different lengths."""

    def __init__(
        self, vocabulary_size: int, embedding_size: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        # With unit scale the means of two short prompts differ clearly.
        table = torch.randn(vocabulary_size, embedding_size, generator=generator)
        self.embedding = nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="mean")
        # Every prompt scores 1/4 before the first step.
        self.weight = nn.Parameter(torch.zeros(embedding_size))

    def forward(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return the scores [num_prompts] of prompts [num_prompts][tokens]."""
        token_ids = torch.tensor([token for prompt in prompts for token in prompt])
        lengths = torch.tensor([0, *(len(prompt) for prompt in prompts[:-1])])
        pooled: Tensor = self.embedding(token_ids, lengths.cumsum(0))
        return 0.5 * torch.sigmoid(pooled @ self.weight)
