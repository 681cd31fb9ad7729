"""Norms of a module's per-sample gradients."""

from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.hooks import record_calls


def recorded_norms(model, inputs, objectives=lambda output: output.flatten(1).square().sum(dim=1)):
    with record_calls(model) as recording:
        output = model(inputs)
    return measure_gradients(model, objectives(output), recording).squared_norms
