r"""Every trajectory's gradient norm and the weighted sum of all gradients, from ONE backward pass.

Problem. The optimal baseline weighs trajectory i by n_i = ||grad f_i||^2, and only when it is known
do the coefficients of the step's gradient, sum_i c_i grad f_i. Autograd gives the sum with one
backward pass and the norms with one pass for each i, or with a second pass over all of them.

Way. A module applied to a batch meets parameter p once for each trajectory, so that grad_p f_i is a
function of the module's inputs and of the gradient at its outputs, both in trajectory i alone. The
coefficients have the form c_i = offset_i + slope_g with g the group of i: of an advantage R_i - b_g
the reward is known beforehand and the baseline is not. Hence:

    forward    every module that owns a trainable parameter is recorded
    backward   one pass of sum_i f_i, down to the recorded outputs and no further
    measure    as each output's gradient comes by: per-trajectory gradients, squared and added up
    sum        as soon as the group's norms give the slope

A matrix is measured in one of two ways, whichever does less:

    kept       norms from products of tokens with tokens; inputs and output gradients are kept,
               and the sum is one product over all tokens. Beyond a plain backward pass it costs
               2 T^2 (p + d) flops for a [p, d] matrix and T tokens: short sequences.
    reduced    each gradient is formed in full, squared, and added to two totals at once, one
               weighted by the offsets and one per group. Forming the gradients is what a plain
               backward pass does too; the rest is a few touches of each element: long sequences.

Both are exact. The sum over a parameter's calls stands inside the norm: a tied embedding, or a
module called twice, has one gradient, and is measured when all its calls have been heard.

Memory. `kept` holds on to output gradients, T (p + d) numbers per trajectory; `reduced` needs one
copy of the matrix per group, and per-trajectory gradients of `_CHUNK_ELEMENTS` numbers, one
trajectory's at least.

Limits. Trajectories must not meet within a module (batch normalization). Rows that hold several of
them are told apart by `segments`, and unpacked as gradients come by (`packing`). A parameter that
is used outside the forward of the module that owns it goes unseen. An argument whose first axis
happens to be as long as the batch is taken for per-trajectory data. What can be noticed raises
ValueError.

Sources: Bu et al., arXiv 2210.00038 (book-keeping: norms and weighted sum without a second backward
pass) and arXiv 2205.10683 (choice between ghost and full norms). The split into offsets and slopes,
which makes the reduced form possible, is this project's.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

import torch
from torch import Tensor, nn

from vcpo_learner.per_sample_gradients.hooks import ModuleCall, Recording, own_trainable_parameters
from vcpo_learner.per_sample_gradients.layer_gradients import (
    Factors,
    ParameterUse,
    TokenProducts,
    parameter_use,
)
from vcpo_learner.per_sample_gradients.unpack_rows import Packing, packing
from vcpo_learner.per_sample_gradients.weighted_sum import Combination, KeptMatrix, ReducedParameter

_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Numbers of per-trajectory gradients held at once: near what a CPU's caches hold (4 MiB in
float32), and enough of them to keep a GPU busy (256 MiB)."""

_FLOPS_PER_TOUCH = {"cpu": 24.0, "cuda": 400.0}
"""Multiplications that a device does while it reads and writes one number of main memory."""

_TOUCHES = 3.0
"""Times that `reduced` goes over each element of a gradient: form, square, add."""


@dataclass(slots=True, kw_only=True, eq=False)
class MeasuredGradients:
    """Squared norms, and what it takes to form the sum."""

    squared_norms: Tensor
    """[batch] float64, at least 0; as exact as the parameters' number type."""
    combination: Combination | None
    _parts: list[KeptMatrix | ReducedParameter] = field(default_factory=list)

    def add_to_parameters(self, slopes: Sequence[float]) -> None:
        """Complete the sum in the parameters' `.grad`, which must not be used before; call once.

        slopes: [num_groups].
        """
        if self.combination is None:
            raise ValueError("combination is None: only norms were measured; give one")
        by_group = self.combination.offsets.new_tensor(slopes)
        coefficients = self.combination.coefficients(by_group)
        with torch.no_grad():
            for part in self._parts:
                dtype = part.parameter.dtype
                part.add(coefficients.to(dtype), by_group.to(dtype))
        self._parts.clear()


def measure_gradients(
    model: nn.Module,
    objectives: Tensor,
    recording: Recording,
    combination: Combination | None = None,
    *,
    segments: Tensor | None = None,
    retain_graph: bool = False,
) -> MeasuredGradients:
    """Squared L2 norm of each objective's gradient over all trainable parameters.

    objectives: [batch] one number per trajectory, made in the forward pass of `recording` and with
        the trajectories in the order of the batch, or of their numbers in `segments`.
    combination: the sum that is wanted beside the norms; None wants none, and leaves the
        parameters' `.grad` as it is.
    segments: [rows, tokens] int64, the trajectory that each token of a packed row belongs to, -1
        for padding; None when every row is one trajectory.
    retain_graph: keep the graph for another backward pass through `objectives`.
    Raises: ValueError, naming the module or parameter, when a call's first axis is not the batch, a
    recorded input was changed in place, or a trainable parameter was in no call; with `segments`
    also as `packing`, when a call is not made of one entry per token, and when a padding token has
    a gradient.
    """
    packed = None if segments is None else packing(segments, len(objectives))
    for call in recording.calls:
        if packed is None:
            call.require_per_trajectory(len(objectives))
        else:
            packed.require_per_token(call)
    norms = torch.zeros(len(objectives), dtype=torch.float64, device=objectives.device)
    measured = MeasuredGradients(squared_norms=norms, combination=combination)
    collector = _Collector(model, recording.calls, measured, packed)
    recording.backward(objectives.sum(), collector.hear, retain_graph=retain_graph)
    collector.finish()
    return measured


class _Collector:
    """Gathers a parameter's uses during the backward pass and measures it at the last one."""

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[ModuleCall],
        measured: MeasuredGradients,
        packed: Packing | None,
    ) -> None:
        self._measured = measured
        self._packed = packed
        self._products = TokenProducts()
        self._heard: dict[nn.Parameter, list[ParameterUse]] = {}
        self._awaited = Counter(
            parameter
            for call in calls
            for parameter in own_trainable_parameters(call.module).values()
        )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter not in self._awaited:
                raise ValueError(
                    f"parameter {name!r} is trainable, but its module was not called: gradient "
                    "norms cannot see how it is used; freeze it, or call the module that owns it"
                )

    @torch.no_grad()
    def hear(self, call: ModuleCall, output_gradient: Tensor) -> None:
        call.require_unchanged()
        if self._packed is not None:
            call, output_gradient = self._packed.unpacked(call, output_gradient)
        for name, parameter in own_trainable_parameters(call.module).items():
            uses = self._heard.setdefault(parameter, [])
            uses.append(parameter_use(call, name, parameter, output_gradient))
            self._awaited[parameter] -= 1
            if self._awaited[parameter] == 0:
                self._measure(self._heard.pop(parameter))

    @torch.no_grad()
    def finish(self) -> None:
        """Measure what the objectives use in some of its calls only."""
        while self._heard:
            _, uses = self._heard.popitem()
            self._measure(uses)

    def _measure(self, uses: Sequence[ParameterUse]) -> None:
        factors = [use.factors for use in uses if use.factors is not None]
        if len(factors) == len(uses) and is_kept_cheaper(uses[0].parameter, factors):
            self._measure_kept(uses[0].parameter, factors)
        else:
            self._measure_reduced(uses)

    def _measure_kept(self, parameter: nn.Parameter, factors: Sequence[Factors]) -> None:
        norms = self._measured.squared_norms
        tokens = max(each.columns.shape[1] for each in factors)
        for samples in _chunks(norms.device, len(norms), tokens**2):
            parts = [each.part(samples) for each in factors]
            total = torch.zeros_like(norms[samples])
            for first, second in combinations_with_replacement(parts, 2):
                total += first.inner_products(second, self._products) * (
                    1.0 if first is second else 2.0
                )
            # Rounding may leave the square of a vanishing gradient just under zero.
            norms[samples] += total.clamp_min(0.0)
        if self._measured.combination is not None:
            self._measured._parts.append(KeptMatrix(parameter=parameter, factors=factors))

    def _measure_reduced(self, uses: Sequence[ParameterUse]) -> None:
        parameter, combination = uses[0].parameter, self._measured.combination
        norms = self._measured.squared_norms
        part = None
        if combination is not None:
            sums = parameter.new_zeros(combination.num_groups, parameter.numel())
            part = ReducedParameter(parameter=parameter, group_sums=sums)
            self._measured._parts.append(part)
        for samples in _chunks(norms.device, len(norms), parameter.numel()):
            gradients = uses[0].gradients(samples).flatten(1)
            for use in uses[1:]:
                gradients = gradients + use.gradients(samples).flatten(1)
            norms[samples] += torch.linalg.vector_norm(gradients, dim=1).double().square()
            if combination is not None and part is not None:
                part.reduce(gradients, combination, samples)


def is_kept_cheaper(parameter: Tensor, factors: Sequence[Factors]) -> bool:
    """Whether products of tokens cost less than going over each trajectory's gradient in full."""
    num_rows, num_columns = parameter.shape
    tokens = sum(each.columns.shape[1] for each in factors)
    touch = _FLOPS_PER_TOUCH.get(parameter.device.type, _FLOPS_PER_TOUCH["cuda"])
    return tokens**2 * (num_rows + num_columns) <= _TOUCHES * touch * num_rows * num_columns


def _chunks(device: torch.device, batch_size: int, elements_each: int) -> Iterator[slice]:
    elements = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS["cuda"])
    size = max(1, elements // elements_each)
    for start in range(0, batch_size, size):
        yield slice(start, min(start + size, batch_size))
