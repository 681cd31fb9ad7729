r"""Every trajectory's gradient norm and the weighted sum of all gradients, from ONE backward pass.

A module applied to a batch uses parameter p once for each trajectory, so grad_p f_i follows from
the module's inputs and from the gradient at its outputs. The coefficients of the sum have the form
c_i = offset_i + slope_g, with g the group of i: only the slope waits for the group's norms.

    forward    tap the output of every module that owns a trainable parameter (`taps`)
    backward   one pass of sum_i f_i, by all taps and to no parameter
    measure    when an output's gradient arrives: per-trajectory gradients, squared and added up
    sum        when the group's norms have given the slope

docs/inside/mathematics.md has the two ways for a matrix, and why. Both are exact.

Limits. A module must not mix trajectories (batch normalization does). A parameter that is used
outside the forward of the module that owns it is not seen. An argument whose first axis happens to
be as long as the batch is taken for per-trajectory data.

Sources: Bu et al., arXiv 2210.00038 (norms and weighted sum without a second backward pass) and
arXiv 2205.10683 (choice between ghost and full norms). Offsets and slopes are this project's.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from torch import Tensor, dtype, no_grad

from vcpo_learner.per_sample_gradients.measurement import Kept, Measurement, Packing
from vcpo_learner.per_sample_gradients.slots import Slot
from vcpo_learner.per_sample_gradients.taps import Recording
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
        assert self.weighted_sum is not None  # it was given
        sums = self.weighted_sum.sums
        coefficients = self.weighted_sum.coefficients(self.squared_norms.new_tensor(slopes))
        with no_grad():
            totals = iter(sums.weighted_sums([slot for kept in self._kept for slot in kept.slots]))
            cast: dict[dtype, Tensor] = {}
            for slots, factors in self._kept:
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
    packing: Packing | None = None,
    retain_graph: bool = False,
) -> MeasuredGradients:
    """Compute the squared L2 norm of each objective's gradient over all trainable parameters.

    objectives: [batch] one number per trajectory, computed in the forward pass of `recording`; in
        the order of the batch, or of the trajectories' numbers in `packing`.
    weighted_sum: the sum to form beside the norms; None forms none, and does not change the
        parameters' `.grad`.
    packing: of the row that holds them all; None when every row is one trajectory.
    retain_graph: keep the graph for another backward pass through `objectives`.
    Raises: LostGradientError, naming the parameters, if the objectives depend on a trainable
    parameter in a way that no tap has seen; ValueError, naming the module, of any other misuse.
    """
    measurement = Measurement(recording, objectives, weighted_sum, packing)
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
