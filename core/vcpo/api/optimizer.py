"""The section of a run that sets the optimizer and its learning rate."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from vcpo.api.fields import Section


class OptimizerName(StrEnum):
    """The optimizer."""

    ADAMW = "adamw"
    MUON = "muon"
    """Muon for matrices, AdamW for the rest."""


ALGORITHMS_OF_RANKS: Final = (OptimizerName.ADAMW,)
"""The algorithms whose step is the same at any number of ranks. `muon` multiplies sharded matrices
in bfloat16, so its step is not."""


class Schedule(StrEnum):
    """How the base learning rate changes after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


FINAL_LEARNING_RATE_RATIO: Final = 0.1
"""Base learning rate of the last step, as a share of `learningRate`, if the schedule lowers it."""

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Optimizer(Section):
    """The optimizer, and the base learning rate that the learning-rate rule scales."""

    name: OptimizerName = OptimizerName.ADAMW
    """Optimizer: `adamw`, or `muon` (for the matrices of the decoder layers, with a momentum of
    0.95 and half of AdamW's memory; AdamW for the rest). Several ranks need `adamw`."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-6
    """Base learning rate, reached after the warm-up. The learning-rate rule scales it at each
    step. Lower it if the reward falls again; adapters take about ten times that of all
    parameters."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Updates over which the base learning rate rises linearly from zero. A skipped step is not an
    update."""
    schedule: Schedule = Schedule.CONSTANT
    """Course of the base learning rate from the warm-up to the last of `steps`: `constant`,
    `linear` or `cosine`; the last two go down to a tenth of `learningRate`. Skipped steps count.
    If `steps` is raised later, the run continues along the longer course."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Decoupled weight decay, of matrices only."""
    betas: Annotated[tuple[Decay, ...], Field(min_length=2, max_length=2)] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    epsilon: Annotated[float, Field(gt=0.0, le=1e-2)] = 1e-8
    """Term that AdamW adds to the square root of the second moment."""
    max_gradient_norm: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    """Largest L2 norm of the whole gradient; a longer gradient is scaled down to it."""

    @property
    def checkpoint_bytes_per_parameter(self) -> int:
        return 12
