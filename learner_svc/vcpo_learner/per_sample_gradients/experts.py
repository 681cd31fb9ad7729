r"""Per-sample gradients of experts, which see tokens and no trajectories.

The experts of a layer share two parameters, with one matrix for each expert. A token that a router
sends to an expert is a pair. With inputs a_p and output gradients b_p of pairs p, trajectory i has

    ||G_i||^2 = sum_e || sum_{p: expert e, token of i} b_p a_p^T ||^2,

so all that is needed beside inputs and gradients is the trajectory of each pair's token. The pairs
of an expert are laid out with one trajectory to a row, and measured as those of a linear layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vcpo_learner.per_sample_gradients.factors import Factors, as_factor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertGradients:
    """Per-sample gradients of one expert's matrix."""

    factors: Factors

    @property
    def matrix(self) -> int | None:
        return self.factors.matrix

    def gradients(self, samples: slice) -> Tensor:
        rows = self.factors.rows
        return self.factors.part(samples).full(num_rows=rows.shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertSite:
    """Products of one parameter's matrices with tokens, without the tensors."""

    place: str
    """The module's name and type, for error messages."""
    module: nn.Module
    parameter_name: str
    """Name of the parameter in its module; the parameter is [experts, outputs, inputs]."""
    is_transposed: bool
    """Whether it is [experts, inputs, outputs]."""
    num_pairs: Sequence[int]
    """[experts]"""
    num_tokens: int
    """Tokens that the router saw."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.module.get_parameter(self.parameter_name)]

    @property
    def parameter_names(self) -> list[str]:
        return [self.parameter_name]

    def of(self, parameter_name: str) -> "ExpertSite":
        return replace(self, parameter_name=parameter_name)

    def call(self, tensors: Sequence[Tensor]) -> "ExpertCall":
        inputs, tokens = tensors
        return ExpertCall(site=self, inputs=inputs, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertCall:
    """Products of one parameter's matrices with tokens."""

    site: ExpertSite
    inputs: Tensor
    """[pairs, inputs], the pairs of one expert after those of another."""
    tokens: Tensor
    """[pairs] int64, the token of each; they count through all rows."""

    def gradients(
        self, output_gradient: Tensor, owners: Tensor, num_trajectories: int
    ) -> list[ExpertGradients]:
        """Return the gradients of every expert that has one.

        output_gradient: [pairs, outputs].
        owners: [num_tokens] int64, each token's trajectory; below 0 for padding.
        Raises: ValueError, naming the module, if padding has a gradient.
        """
        # Experts get padding, and in the last layer prompts, whose gradient is 0.
        busy = output_gradient.any(dim=1).nonzero()[:, 0]
        trajectories = owners[self.tokens[busy]]
        if bool((trajectories < 0).any()):
            raise ValueError(
                f"{self.site.place} has a gradient at padding: a trajectory depends on it; mask it"
                " in the attention"
            )
        num_experts = len(self.site.num_pairs)
        sizes = torch.tensor(self.site.num_pairs, device=busy.device)
        experts = torch.arange(num_experts, device=busy.device).repeat_interleave(
            sizes, output_size=len(self.tokens)
        )
        keys, order = torch.sort(experts[busy] * num_trajectories + trajectories, stable=True)
        counts = torch.bincount(keys, minlength=num_experts * num_trajectories)
        columns = torch.arange(len(keys), device=keys.device) - (counts.cumsum(0) - counts)[keys]
        precise = torch.promote_types(self.site.parameters[0].dtype, torch.float32)
        sides = [
            as_factor(each[busy[order]], output_gradient.dtype, precise)
            for each in (output_gradient, self.inputs)
        ]
        if self.site.is_transposed:
            sides.reverse()
        return _by_expert(
            sides, keys % num_trajectories, columns, counts.view(num_experts, num_trajectories)
        )


def _by_expert(
    sides: Sequence[Tensor], trajectories: Tensor, columns: Tensor, counts: Tensor
) -> list[ExpertGradients]:
    """Lay each expert's pairs out as [trajectories, most pairs of one, features].

    sides: rows and columns of outer products, [pairs, features], in the order of their experts.
    trajectories, columns: [pairs] int64, the place of each pair.
    counts: [experts, trajectories] int64.
    """
    num_pairs = counts.sum(dim=1).tolist()
    found = []
    parts = zip(
        counts.amax(dim=1).tolist(),
        *(torch.split(each, num_pairs) for each in (*sides, trajectories, columns)),
        strict=True,
    )
    for expert, (width, rows, inputs, trajectory, column) in enumerate(parts):
        if width == 0:
            continue
        place = trajectory * width + column
        laid_out = [
            each.new_zeros(counts.shape[1] * width, each.shape[1])
            .index_copy_(0, place, each)
            .view(counts.shape[1], width, -1)
            for each in (rows, inputs)
        ]
        factors = Factors(rows=laid_out[0], columns=laid_out[1], matrix=expert)
        found.append(ExpertGradients(factors=factors))
    return found
