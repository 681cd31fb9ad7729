"""The model's passes over a batch, one micro-batch in memory at a time."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from vcpo.algo import GradientNormEstimator
from vcpo.spec import VCPORunSpec
from vcpo.spec.algorithm import RowLayout
from vcpo.spec.workloads import Precision
from vcpo_learner.forward.forward_pass import ForwardPass, forward_pass
from vcpo_learner.forward.logprobs import token_logprobs, weighted_logprobs
from vcpo_learner.forward.packed_rows import require_kept_apart
from vcpo_learner.forward.token_batch import (
    BatchTokens,
    TokenBatch,
    group_micro_batches,
    micro_batches,
)


class MicroBatchRunner:
    """Splits batches and runs a model on the parts; holds nothing from one update to the next."""

    def __init__(self, model: nn.Module, spec: VCPORunSpec, pad_token_id: int) -> None:
        parameter = next(model.parameters())
        self.device = parameter.device
        self.logprob_dtype = torch.promote_types(parameter.dtype, torch.float32)
        """Of the log-probabilities that the model's passes return."""
        self.size = spec.batch.micro_batch_trajectories
        """Trajectories in memory at a time; a group that is gone over at once may be larger."""
        self.temperature = spec.sampling.temperature
        self._model = model
        self._pad_token_id = pad_token_id
        self._packs = spec.batch.row_layout is RowLayout.PACKED
        if self._packs:
            require_kept_apart(model)
        self._use_bfloat16 = spec.learner.precision is Precision.BFLOAT16

    def split(
        self, tokens: BatchTokens, positions: Sequence[int]
    ) -> Iterator[tuple[list[int], TokenBatch]]:
        """Yield the trajectories at these positions by micro-batch, with their positions."""
        for part in micro_batches([tokens.num_tokens[at] for at in positions], self.size):
            chosen = [positions[index] for index in part]
            yield chosen, tokens.micro_batch(chosen, self._pad_token_id, packs=self._packs)

    def split_groups(
        self, tokens: BatchTokens, groups: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[Sequence[int]], TokenBatch]]:
        """Yield whole groups by micro-batch, with the positions of each group's trajectories."""
        lengths = [[tokens.num_tokens[at] for at in group] for group in groups]
        for run in group_micro_batches(lengths, self.size):
            part = [groups[index] for index in run]
            chosen = list(chain.from_iterable(part))
            yield part, tokens.micro_batch(chosen, self._pad_token_id, packs=self._packs)

    def forward(self, batch: TokenBatch, estimator: GradientNormEstimator | None) -> ForwardPass:
        """Run the model forward, and keep what the estimator of gradient norms needs."""
        with self.autocast():
            return forward_pass(self._model, batch, estimator, temperature=self.temperature)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return the log-probabilities of the trained tokens, [batch, width] nats."""
        with self.autocast():
            return token_logprobs(self._model, batch, temperature=self.temperature)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model computes in the run's number type."""
        if not self._use_bfloat16:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def backward(logprobs: Tensor, weights: Tensor) -> None:
    """Add the gradient of sum_it k_it log pi(y_it) to the parameters' `.grad`.

    logprobs: [batch, width] with their graph; weights: [batch, width] k_it, held constant.
    """
    torch.autograd.backward(weighted_logprobs(logprobs, weights).sum())
