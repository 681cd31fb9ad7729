r"""Every trajectory's gradient norm and the weighted sum of all gradients, from ONE backward pass.

Problem. The optimal baseline weighs trajectory i by n_i = ||grad f_i||^2. The coefficients c_i of
the step's gradient sum_i c_i grad f_i depend on the baseline. Autograd computes the sum with one
backward pass, and the norms with one more pass per trajectory, or with a second pass over all.

Solution. A module applied to a batch uses parameter p once for each trajectory. So grad_p f_i is a
function of the module's inputs and of the gradient at its outputs, both of trajectory i alone. The
coefficients have the form c_i = offset_i + slope_g, with g the group of i: the reward in an
advantage R_i - b_g is known before the backward pass, the baseline is not. Hence:

    forward    record every module that owns a trainable parameter
    backward   one pass of sum_i f_i, down to the recorded outputs and no further
    measure    when an output's gradient arrives: per-trajectory gradients, squared and added up
    sum        when the group's norms have given the slope

A matrix is measured in one of two ways, the one with fewer operations:

    kept       norms from products of tokens with tokens. Inputs and output gradients are kept, and
               the sum is one product over all tokens. Beyond a plain backward pass it costs
               2 T^2 (p + d) flops for a [p, d] matrix and T tokens: best for short sequences.
    reduced    each gradient is formed in full, squared, and added to two totals, one weighted by
               the offsets and one per group. A plain backward pass forms the gradients too; the
               rest reads and writes each element a few times: best for long sequences.

Both are exact. The norm is of the sum over a parameter's calls: a tied embedding, or a module that
is called twice, has one gradient, and is measured when the gradients of all calls have arrived.

Memory. `kept` holds output gradients, T (p + d) numbers per trajectory. `reduced` needs one copy of
the matrix per group, and per-trajectory gradients of `_CHUNK_ELEMENTS` numbers, at least those of
one trajectory.

Limits. A module must not mix trajectories (batch normalization does). If rows hold several
trajectories, `segments` says which token belongs to which, and the rows are unpacked
(`unpack_rows`). A parameter that is used outside the forward of the module that owns it is not
seen. An argument whose first axis happens to be as long as the batch is taken for per-trajectory
data. Misuse that can be detected raises ValueError.

Sources: Bu et al., arXiv 2210.00038 (book-keeping: norms and weighted sum without a second backward
pass) and arXiv 2205.10683 (choice between ghost and full norms). The split into offsets and slopes
is this project's; it makes the reduced form possible.
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
    LayerGradients,
    TokenProducts,
    layer_gradients,
)
from vcpo_learner.per_sample_gradients.unpack_rows import Packing, locate_tokens
from vcpo_learner.per_sample_gradients.weighted_sum import KeptMatrix, ReducedParameter, WeightedSum

_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements of per-trajectory gradients in memory at once: about a CPU's cache (4 MiB in float32),
and enough to keep a GPU busy (256 MiB)."""

_FLOPS_PER_TOUCH = {"cpu": 24.0, "cuda": 400.0}
"""Multiplications in the time of reading and writing one number of main memory."""

_TOUCHES = 3.0
"""Times that `reduced` reads or writes each element of a gradient: form, square, add."""


@dataclass(slots=True, kw_only=True, eq=False)
class MeasuredGradients:
    """Squared norms, and the parts that the weighted sum is formed from."""

    squared_norms: Tensor
    """[batch] float64, at least 0; as exact as the parameters' number type."""
    weighted_sum: WeightedSum | None
    _parts: list[KeptMatrix | ReducedParameter] = field(default_factory=list)

    def add_to_parameters(self, slopes: Sequence[float]) -> None:
        """Complete the sum in the parameters' `.grad`; call once. `.grad` is incomplete before.

        slopes: [num_groups].
        """
        if self.weighted_sum is None:
            raise ValueError("weighted_sum is None: only norms were measured; give one")
        by_group = self.weighted_sum.offsets.new_tensor(slopes)
        coefficients = self.weighted_sum.coefficients(by_group)
        with torch.no_grad():
            for part in self._parts:
                dtype = part.parameter.dtype
                part.add(coefficients.to(dtype), by_group.to(dtype))
        self._parts.clear()


def measure_gradients(
    model: nn.Module,
    objectives: Tensor,
    recording: Recording,
    weighted_sum: WeightedSum | None = None,
    *,
    segments: Tensor | None = None,
    retain_graph: bool = False,
) -> MeasuredGradients:
    """Compute the squared L2 norm of each objective's gradient over all trainable parameters.

    objectives: [batch] one number per trajectory, computed in the forward pass of `recording`; in
        the order of the batch, or of the trajectories' numbers in `segments`.
    weighted_sum: the sum to form beside the norms; None forms none, and does not change the
        parameters' `.grad`.
    segments: [rows, tokens] int64, the trajectory that each token of a packed row belongs to, -1
        for padding; None when every row is one trajectory.
    retain_graph: keep the graph for another backward pass through `objectives`.
    Raises: ValueError, naming the module or parameter, if a call's first axis is not the batch, a
    recorded input was changed in place, or a trainable parameter was in no call; with `segments`
    also as `locate_tokens`, if a call does not have one entry per token, or if a padding token has
    a gradient.
    """
    packed = None if segments is None else locate_tokens(segments, len(objectives))
    for call in recording.calls:
        if packed is None:
            call.require_per_trajectory(len(objectives))
        else:
            packed.require_per_token(call)
    norms = torch.zeros(len(objectives), dtype=torch.float64, device=objectives.device)
    measured = MeasuredGradients(squared_norms=norms, weighted_sum=weighted_sum)
    collector = _Collector(model, recording.calls, measured, packed)
    recording.backward(objectives.sum(), collector.receive, retain_graph=retain_graph)
    collector.finish()
    return measured


class _Collector:
    """Collects the gradients of a parameter's calls, and measures the parameter at the last."""

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
        self._arrived: dict[nn.Parameter, list[LayerGradients]] = {}
        self._num_missing = Counter(
            parameter
            for call in calls
            for parameter in own_trainable_parameters(call.module).values()
        )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter not in self._num_missing:
                raise ValueError(
                    f"parameter {name!r} is trainable, but its module was not called: gradient "
                    "norms cannot see how it is used; freeze it, or call the module that owns it"
                )

    @torch.no_grad()
    def receive(self, call: ModuleCall, output_gradient: Tensor) -> None:
        call.require_unchanged()
        if self._packed is not None:
            call, output_gradient = self._packed.unpack(call, output_gradient)
        for name, parameter in own_trainable_parameters(call.module).items():
            uses = self._arrived.setdefault(parameter, [])
            uses.append(layer_gradients(call, name, parameter, output_gradient))
            self._num_missing[parameter] -= 1
            if self._num_missing[parameter] == 0:
                self._measure(self._arrived.pop(parameter))

    @torch.no_grad()
    def finish(self) -> None:
        """Measure parameters that have calls without a gradient."""
        while self._arrived:
            _, uses = self._arrived.popitem()
            self._measure(uses)

    def _measure(self, uses: Sequence[LayerGradients]) -> None:
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
        if self._measured.weighted_sum is not None:
            self._measured._parts.append(KeptMatrix(parameter=parameter, factors=factors))

    def _measure_reduced(self, uses: Sequence[LayerGradients]) -> None:
        parameter, weighted_sum = uses[0].parameter, self._measured.weighted_sum
        norms = self._measured.squared_norms
        part = None
        if weighted_sum is not None:
            sums = parameter.new_zeros(weighted_sum.num_groups, parameter.numel())
            part = ReducedParameter(parameter=parameter, group_sums=sums)
            self._measured._parts.append(part)
        for samples in _chunks(norms.device, len(norms), parameter.numel()):
            gradients = uses[0].gradients(samples).flatten(1)
            for use in uses[1:]:
                gradients = gradients + use.gradients(samples).flatten(1)
            norms[samples] += torch.linalg.vector_norm(gradients, dim=1).double().square()
            if weighted_sum is not None and part is not None:
                part.reduce(gradients, weighted_sum, samples)


def is_kept_cheaper(parameter: Tensor, factors: Sequence[Factors]) -> bool:
    """Return whether products of tokens cost less than forming each trajectory's gradient."""
    num_rows, num_columns = parameter.shape
    tokens = sum(each.columns.shape[1] for each in factors)
    touch = _FLOPS_PER_TOUCH.get(parameter.device.type, _FLOPS_PER_TOUCH["cuda"])
    return tokens**2 * (num_rows + num_columns) <= _TOUCHES * touch * num_rows * num_columns


def _chunks(device: torch.device, batch_size: int, elements_each: int) -> Iterator[slice]:
    elements = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS["cuda"])
    size = max(1, elements // elements_each)
    for start in range(0, batch_size, size):
        yield slice(start, min(start + size, batch_size))
