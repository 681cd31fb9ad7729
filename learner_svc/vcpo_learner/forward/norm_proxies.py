r"""Stand-ins for a trajectory's squared gradient norm, ||sum_t a_t g_t||^2.

Here g_t = grad log pi(y_t), and a_t is the token's weight in the gradient's estimator. Each proxy
costs less than the norm and is less accurate. A common factor of all norms does not change a
baseline that weighs by them, so a proxy is as good as the norm if both are proportional:

    lmHead        keeps one matrix, the output head's: sum_t a_t b_t h_t^T with b_t the gradient at
                  the logits and h_t the hidden state. Assumes that the head has the same part in
                  every trajectory's norm.
    logitEnergy   keeps each token's b_t and drops the rest: sum_t a_t^2 e_t with e_t = ||b_t||^2.
                  Assumes that tokens are uncorrelated, and that the way from the parameters to the
                  logits lengthens all of their b_t alike.
    length        keeps the weights: sum_t a_t^2. Assumes that the g_t are uncorrelated and of one
                  length; a trajectory's mean over T tokens then has a norm proportional to 1/T.

Source of lmHead: the ghost norm of Li et al., arXiv 2110.05679, of the last layer. The energy is
||onehot(y) - pi||^2, the gradient of log softmax.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from vcpo_learner.forward.packed_rows import PackedRows
from vcpo_learner.per_sample_gradients.factors import Factors, TokenProducts


def length_norms(weights: Tensor) -> Tensor:
    """sum_t a_t^2, [batch] float64, of weights [batch, width] that are 0 outside the response."""
    return weights.double().square().sum(dim=1)


def logit_energy_norms(weights: Tensor, energies: Tensor) -> Tensor:
    """sum_t a_t^2 e_t, [batch] float64.

    weights, energies: [batch, width]; weights are 0 outside the response.
    """
    return (weights.double().square() * energies).sum(dim=1)


def logit_energies(distributions: Tensor, sampled: Tensor) -> Tensor:
    """Squared length of the gradient of each token's log-probability at the logits, in [0, 2].

    e = ||onehot(y) - pi||^2 = 1 - 2 pi(y) + sum_v pi_v^2, at logits divided by the temperature.
    distributions: [..., vocabulary] nats, the log of pi.
    sampled: [...] nats, the log of pi(y).
    """
    collision = torch.logsumexp(2.0 * distributions, dim=-1).exp()
    # Rounding may leave the energy of a token that is all but certain just under zero.
    return (1.0 - 2.0 * sampled.exp() + collision).clamp_min(0.0)


def lm_head_norms(inputs: Tensor, output_gradients: Tensor) -> Tensor:
    """||sum_t b_t h_t^T||^2, [batch] float64, of the output head's matrix.

    inputs: [batch, tokens, hidden] h_t.
    output_gradients: [batch, tokens, vocabulary] b_t, with the weights a_t inside.
    """
    pairs = zip(inputs, output_gradients, strict=True)
    return torch.cat([_summed_norm(own_inputs, rows) for own_inputs, rows in pairs])


@dataclass(slots=True, kw_only=True, eq=False)
class HeadCall:
    """The inputs of the output head in one forward pass, and its outputs' places in the graph."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[GradientEdge] = field(default_factory=list)

    def squared_norms(self, objective: Tensor, rows: PackedRows | None = None) -> Tensor:
        """`lm_head_norms` of a sum over trajectories, by a backward pass no further than the head.

        rows: the layout that the model was given; None for one trajectory per row.
        The graph is kept for another backward pass.
        Raises: ValueError if the forward pass did not call the head exactly once.
        """
        if len(self.outputs) != 1:
            raise ValueError(
                f"the output head was called {len(self.outputs)} times with a gradient: "
                "norms of kind 'lmHead' need one call in each forward pass; use 'exact'"
            )
        (gradient,) = torch.autograd.grad(objective, self.outputs, retain_graph=True)
        inputs = self.inputs[0]
        if rows is not None:
            inputs, gradient = rows.unpack(inputs), rows.unpack(gradient)
        return lm_head_norms(inputs, gradient)


@contextmanager
def record_head(model: nn.Module) -> Iterator[HeadCall]:
    """Record the calls of a model's output head, and of no other layer, while the block runs.

    model: one of transformers' causal language models.
    Raises: ValueError if it names no output head.
    """
    recorded = HeadCall()

    def record(_: nn.Module, positional: tuple[Tensor, ...], output: Any) -> None:
        if output.requires_grad:
            recorded.inputs.append(positional[0].detach())
            recorded.outputs.append(get_gradient_edge(output))

    handle = _output_head(model).register_forward_hook(record)
    try:
        yield recorded
    finally:
        handle.remove()


def _output_head(model: nn.Module) -> nn.Module:
    named = getattr(model, "get_output_embeddings", None)
    head: nn.Module | None = None if named is None else named()
    if head is None:
        raise ValueError(
            f"model {type(model).__name__} names no output head (get_output_embeddings): "
            "norms of kind 'lmHead' need one; use 'exact'"
        )
    return head


def _summed_norm(inputs: Tensor, gradients: Tensor) -> Tensor:
    """||sum_t b_t h_t^T||^2, [1] float64, of [tokens, hidden] and [tokens, vocabulary]."""
    is_busy = (gradients != 0.0).any(dim=1)
    dtype = torch.promote_types(gradients.dtype, torch.float32)
    rows, columns = (each[is_busy].to(dtype)[None] for each in (gradients, inputs))
    factors = Factors(rows=rows, columns=columns)
    num_tokens, num_rows, num_columns = rows.shape[1], rows.shape[2], columns.shape[2]
    if num_tokens * (num_rows + num_columns) <= num_rows * num_columns:
        return factors.inner_products(factors, TokenProducts()).clamp_min(0.0)
    return factors.full(num_rows).double().square().sum(dim=(1, 2))
