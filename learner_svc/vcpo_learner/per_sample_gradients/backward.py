r"""Every trajectory's gradient norm and the weighted sum of all gradients, from ONE backward pass.

Problem. The optimal baseline weighs trajectory i by n_i = ||grad f_i||^2. The coefficients c_i of
the step's gradient sum_i c_i grad f_i depend on the baseline. Autograd computes the sum with one
backward pass, and the norms with one more pass per trajectory, or with a second pass over all.

Solution. A module applied to a batch uses parameter p once for each trajectory. So grad_p f_i is a
function of the module's inputs and of the gradient at its outputs, both of trajectory i alone. The
coefficients have the form c_i = offset_i + slope_g, with g the group of i: the reward in an
advantage R_i - b_g is known before the backward pass, the baseline is not. Hence:

    forward    tap the output of every module that owns a trainable parameter (`taps`)
    backward   one pass of sum_i f_i, by all taps and to no parameter
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
the matrix per group, and per-trajectory gradients of some million numbers, at least those of one
trajectory.

Limits. A module must not mix trajectories (batch normalization does). If rows hold several
trajectories, `segments` says which token belongs to which, and the rows are unpacked
(`unpack_rows`). A parameter that is used outside the forward of the module that owns it is not
seen. An argument whose first axis happens to be as long as the batch is taken for per-trajectory
data. Misuse that can be detected raises ValueError.

Sources: Bu et al., arXiv 2210.00038 (book-keeping: norms and weighted sum without a second backward
pass) and arXiv 2205.10683 (choice between ghost and full norms). The split into offsets and slopes
is this project's; it makes the reduced form possible.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from torch import Tensor, dtype, no_grad

from vcpo_learner.per_sample_gradients.measurement import Kept, Measurement
from vcpo_learner.per_sample_gradients.slots import Slot
from vcpo_learner.per_sample_gradients.taps import Recording
from vcpo_learner.per_sample_gradients.unpack_rows import locate_tokens
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredGradients:
    """Squared norms, and what the weighted sum still needs beside `SlotSums`."""

    squared_norms: Tensor
    """[batch] float64, at least 0; as exact as the parameters' number type."""
    weighted_sum: WeightedSum | None
    unused: Set[Slot] = frozenset()
    """Slots on which no objective depends."""
    _kept: list[Kept] = field(default_factory=list)
    """Matrices that are in no sum yet."""

    def add_to_parameters(self, slopes: Sequence[float]) -> None:
        """Complete the gradient; call once, after the last micro-step that shares the sums.

        slopes: [num_groups]. The gradient is incomplete before.
        """
        if self.weighted_sum is None:
            raise ValueError("weighted_sum is None: only norms were measured; give one")
        sums = self.weighted_sum.sums
        coefficients = self.weighted_sum.coefficients(self.squared_norms.new_tensor(slopes))
        with no_grad():
            totals = iter(sums.weighted_sums([slot for kept in self._kept for slot in kept.slots]))
            cast: dict[dtype, Tensor] = {}
            for slots, (factors,) in self._kept:
                own = [next(totals) for _ in slots]
                if own[0].dtype not in cast:
                    cast[own[0].dtype] = coefficients.to(own[0].dtype)[:, None, None]
                factors.add_each_to(own, cast[own[0].dtype])
            self._kept.clear()
            sums.complete(slopes)


def measure_gradients(
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
    Raises: LostGradientError, naming the parameters, if the objectives depend on a trainable
    parameter in a way that no tap has seen. ValueError, naming the module, if a call's first axis
    is not the batch, or an input was changed in place; with `segments` also as `locate_tokens`, if
    a call does not have one entry per token, or if a padding token has a gradient.
    """
    packed = None if segments is None else locate_tokens(segments, len(objectives))
    measurement = Measurement(recording, objectives, weighted_sum, packed)
    for site in recording.sites:
        measurement.require(site)
    total = objectives.sum()
    recording.backward(total, measurement, retain_graph=retain_graph)
    measurement.finish(total)
    return MeasuredGradients(
        squared_norms=measurement.squared_norms,
        weighted_sum=weighted_sum,
        unused=measurement.unused,
        _kept=measurement.kept,
    )
