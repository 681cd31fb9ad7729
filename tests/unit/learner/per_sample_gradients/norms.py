"""Norms and sums of a module's per-sample gradients."""

from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.slot_sums import ParameterSums
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import record_calls
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum


def recorded_norms(model, inputs, objectives=lambda output: output.flatten(1).square().sum(dim=1)):
    with record_calls(Slots(model)) as recording:
        output = model(inputs)
    return measure_gradients(objectives(output), recording).squared_norms


def summed(model, offsets, groups):
    sums = ParameterSums(Slots(model), groups[-1] + 1)
    return WeightedSum(offsets=offsets, groups=groups, sums=sums)
