"""Norms and sums of mixtures of experts, whose experts see tokens and no trajectories."""

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.fixtures.learner.models import MIXTURES, PAD, sampled_groups, seeded_model
from tests.fixtures.learner.norms import recorded_norms, summed
from tests.fixtures.learner.updates import expected_gradient, gradient_of_step, make_spec
from vcpo.api.algorithm import RowLayout
from vcpo_learner.forward.logprobs import token_logprobs
from vcpo_learner.forward.token_batch import token_batch
from vcpo_learner.per_sample_gradients import measurement
from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.coverage import require_gradients
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import record_calls

CPU = torch.device("cpu")


class Routed(nn.Module):
    """Two experts of width 1 and weights 1, each of which squares a positive number."""

    def __init__(self, experts_of_tokens):
        super().__init__()
        sizes = {"hidden_size": 1, "intermediate_size": 1, "num_local_experts": 2}
        config = MixtralConfig(**sizes, hidden_act="relu")
        config._experts_implementation = "eager"
        self.experts = MixtralExperts(config).double()
        self.chosen = torch.tensor(experts_of_tokens).flatten()[:, None]
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, inputs):
        weights = torch.ones(len(self.chosen), 1).double()
        return self.experts(inputs.flatten(0, 1), self.chosen, weights).view_as(inputs)


def test_a_worked_mixture_adds_up_the_tokens_of_an_expert_and_not_those_of_two():
    # With 1 for all weights an expert's output is x * x, and each of its three weights has the
    # gradient sum x^2 over the tokens that it got: (1, 4), and (1 + 9, 0).
    inputs = torch.tensor([[[1.0], [2.0]], [[1.0], [3.0]]]).double()
    norms = recorded_norms(
        Routed([[0, 1], [0, 0]]), inputs, objectives=lambda output: output.sum(dim=(1, 2))
    )
    assert norms.tolist() == [3.0 * (1.0 + 16.0), 3.0 * 100.0]


def test_experts_in_a_recorded_pass_compute_what_they_always_compute():
    model = seeded_model(MIXTURES["mixtral"], dtype=torch.float64)
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 1]])
    forwards = [module.forward for module in model.modules()]
    with record_calls(Slots(model)):
        found = model(tokens).logits
    torch.testing.assert_close(found, model(tokens).logits, rtol=1e-12, atol=1e-12)
    assert [module.forward for module in model.modules()] == forwards


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "reduced"])
@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", MIXTURES)
def test_the_sum_is_that_of_one_backward_pass(monkeypatch, family, packs, kept):
    monkeypatch.setattr(measurement, "is_kept_cheaper", lambda *_: kept)
    model = seeded_model(MIXTURES[family])
    trajectories = [one for group in sampled_groups(model) for one in group]
    groups, slopes = [0] * 4 + [1] * 4 + [2] * 4, torch.tensor([0.7, -1.3, 0.2]).double()
    offsets = torch.linspace(-1.0, 1.0, 12).double()
    batch = token_batch(trajectories, PAD, CPU, packs=packs)
    objectives = token_logprobs(model, batch, temperature=1.0).sum(dim=1)
    total = (objectives * (offsets + slopes[groups])).sum()
    expected = torch.autograd.grad(total, list(model.parameters()))
    with record_calls(slots := Slots(model)) as recording:
        objectives = token_logprobs(model, batch, temperature=1.0).sum(dim=1)
    segments = None if batch.row is None else batch.row.segments
    found = measure_gradients(
        objectives, recording, summed(model, offsets, groups), segments=segments
    )
    found.add_to_parameters(slopes.tolist())
    for slot, gradient in zip(slots, expected, strict=True):
        distance = float((slots.parameter(slot).grad - gradient).norm() / gradient.norm())
        assert distance < 1e-5, slot.name


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("layout", RowLayout)
def test_a_step_has_the_gradient_written_out_by_hand(family, layout):
    model = seeded_model(MIXTURES[family])
    groups = sampled_groups(model)
    expected = expected_gradient(model, groups, "opob")
    spec = make_spec()
    batch = spec.batch.model_copy(update={"row_layout": layout})
    found = gradient_of_step(model, spec.model_copy(update={"batch": batch}), groups)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_experts_whose_tokens_have_no_gradient_lose_none():
    model = Routed([[0, 1]])
    with record_calls(slots := Slots(model)) as recording:
        objectives = 0.0 * model(torch.ones(1, 2, 1).double()).sum(dim=(1, 2))
    weighted_sum = summed(model, torch.ones(1).double(), [0])
    measured = measure_gradients(objectives, recording, weighted_sum)
    measured.add_to_parameters([0.0])
    assert measured.squared_norms.tolist() == [0.0]
    require_gradients(slots, measured.unused)


def test_padding_that_a_trajectory_depends_on_is_refused():
    model = Routed([[0, 1, 1]])
    with record_calls(Slots(model)) as recording:
        output = model(torch.ones(1, 3, 1).double())
    segments = torch.tensor([[0, 0, -1]])
    with pytest.raises(ValueError, match=r"'experts' \(MixtralExperts\) has a gradient at padding"):
        measure_gradients(output.sum()[None], recording, segments=segments)
