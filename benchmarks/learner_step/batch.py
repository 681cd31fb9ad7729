"""The sizes that a step is measured at, and the batch that all sides train on."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import torch
from transformers import LlamaForCausalLM

from benchmarks.harness.group_tokens import Groups
from benchmarks.harness.random_llama import random_groups, random_llama
from examples.models import smollm2

PAD_TOKEN_ID: Final = 0
PRETRAINED_RESPONSE: Final = 12
"""Tokens of its responses."""
FOLDER: Final = Path(smollm2.__file__).parent / smollm2.NAME


class Size(NamedTuple):
    """Of the model and of its batch, which is one group but for a pretrained model."""

    vocabulary: int
    tokens: int
    """Of each trajectory; a quarter is prompt."""
    trajectories: int
    micro_batch: int
    """Trajectories in one forward pass, on every side."""
    hidden: int = 256
    layers: int = 4
    num_groups: int = 1
    folder: Path | None = None
    """Of a pretrained model, which computes in bfloat16; None: random parameters, float32."""

    @property
    def prompt_tokens(self) -> int:
        return self.tokens // 4 if self.folder is None else self.tokens - PRETRAINED_RESPONSE

    @property
    def num_tokens(self) -> int:
        return self.tokens * self.trajectories * self.num_groups


def _sizes_of(name: str, vocabulary: int) -> dict[str, Size]:
    """About 2048 tokens a micro-batch, or one trajectory where that is longer."""
    shapes = ((256, 8, 8), (1024, 2, 2), (4096, 2, 1))
    return {f"{name}x{shape[0]}": Size(vocabulary, *shape) for shape in shapes}


SIZES: Final = {**_sizes_of("32k", 32_768), **_sizes_of("128k", 131_072)}
"""By name, VOCABULARYxTOKENS."""

PRETRAINED: Final = Size(49_152, 58, 6, 36, num_groups=6, folder=FOLDER)
"""The batch of `make demo-real`."""

QUICK_SIZES: Final = {
    "64x16": Size(64, 16, 4, 4, hidden=32, layers=1),
    "128x32": Size(128, 32, 2, 1, hidden=32, layers=1),
}
"""For tests: everything runs, and the figures say nothing."""


def make_model(size: Size) -> LlamaForCausalLM:
    """A Llama with random parameters, or pretrained, in evaluation mode; the same at every call."""
    if size.folder is not None:
        return LlamaForCausalLM.from_pretrained(size.folder, dtype=torch.float32)
    return random_llama(
        size.hidden, max_tokens=size.tokens, vocabulary=size.vocabulary, num_layers=size.layers
    )


def make_groups(size: Size) -> Groups:
    """Random trajectories of the model of this size; their weights are 1 before the first step."""
    return random_groups(
        make_model(size),
        num_groups=size.num_groups,
        group_size=size.trajectories,
        prompt_tokens=size.prompt_tokens,
        response_tokens=size.tokens - size.prompt_tokens,
    )
