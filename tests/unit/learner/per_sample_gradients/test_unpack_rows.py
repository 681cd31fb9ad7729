from random import Random

import pytest
import torch
from torch import Tensor, nn

from tests.fixtures.learner.models import FAMILIES, VOCABULARY, seeded_model
from tests.fixtures.learner.norms import summed
from vcpo_learner.forward.packed_rows import pack_row
from vcpo_learner.per_sample_gradients import measurement as trajectory_gradients
from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import record_calls

LENGTHS = [3, 6, 5, 4, 2]
SLOPES = [0.7, -1.3]
GROUPS = [0, 0, 0, 1, 1]
BOTH_FORMS = pytest.mark.parametrize("kept", [True, False], ids=["kept", "reduced"])


def token_sequences() -> list[Tensor]:
    random = Random(0)
    return [torch.tensor(random.choices(range(1, VOCABULARY), k=length)) for length in LENGTHS]


def block_diagonal(segments: Tensor) -> Tensor:
    """Additive mask [rows, 1, tokens, tokens]: causal, and within a segment only."""
    width = segments.shape[1]
    is_seen = (segments[:, :, None] == segments[:, None, :]) & torch.ones(
        width, width
    ).tril().bool()
    return torch.zeros(is_seen.shape).double().masked_fill(~is_seen, -1e300)[:, None]


def own_objective(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean log-probability of all tokens but the first, logits [tokens, vocabulary]."""
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None]).mean()


def measure_packed(model, weighted_sum=None, **changes):
    """Measured gradients of a packed row."""
    row = pack_row(LENGTHS, torch.device("cpu"))
    tokens = torch.cat(token_sequences())[None]
    inputs = {
        "attention_mask": block_diagonal(row.segments),
        "position_ids": row.position_ids,
        "use_cache": False,
    }
    with record_calls(Slots(model)) as recording:
        logits = model(input_ids=tokens, **(inputs | changes)).logits
    objectives = torch.stack(
        [
            own_objective(*each)
            for each in zip(logits[0].split(LENGTHS), tokens[0].split(LENGTHS), strict=True)
        ]
    )
    return measure_gradients(objectives, recording, weighted_sum, packing=row.packing)


def objectives_alone(model) -> list[Tensor]:
    return [own_objective(model(each[None]).logits[0], each) for each in token_sequences()]


def squared_norm(model, objective: Tensor) -> float:
    gradients = torch.autograd.grad(objective, list(model.parameters()), materialize_grads=True)
    return sum(float(gradient.square().sum()) for gradient in gradients)


@BOTH_FORMS
@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2 tied"])
def test_norms_and_sum_of_packed_rows_are_those_of_backward_passes(monkeypatch, family, kept):
    monkeypatch.setattr(trajectory_gradients, "is_kept_cheaper", lambda *_: kept)
    model = seeded_model(FAMILIES[family], dtype=torch.float64)
    offsets = torch.linspace(-1.0, 1.0, len(LENGTHS)).double()
    coefficients = (offsets + torch.tensor(SLOPES, dtype=torch.float64)[GROUPS]).tolist()
    total = sum(c * f for c, f in zip(coefficients, objectives_alone(model), strict=True))
    expected = torch.autograd.grad(total, list(model.parameters()))
    norms = [squared_norm(model, each) for each in objectives_alone(model)]
    found = measure_packed(model, summed(model, offsets, GROUPS))
    assert found.squared_norms.tolist() == pytest.approx(norms, rel=1e-9)
    found.add_to_parameters(SLOPES)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


class Scaled(nn.Module):
    """Token by token, with a parameter beside its children."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.randn(2))

    def forward(self, inputs, shift):
        return torch.tanh(self.layer(inputs)) * self.scale + shift


def test_a_worked_row_of_two_trajectories():
    # Inputs (1, 2), then 3: gradients 1 + 2 and 3 with output gradients of 1.
    layer = nn.Linear(1, 1, bias=False).double()
    with record_calls(Slots(layer)) as recording:
        output = layer(torch.tensor([[[1.0], [2.0], [3.0]]]).double())
    objectives = torch.stack([output[0, :2].sum(), output[0, 2].sum()])
    packing = pack_row([2, 1], torch.device("cpu")).packing
    found = measure_gradients(objectives, recording, packing=packing)
    assert found.squared_norms.tolist() == [9.0, 9.0]


def test_layers_side_by_side_share_their_unpacked_input():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, inputs):
            return self.left(inputs) + self.right(inputs)

    found = pack_row([1, 1], torch.device("cpu")).packing
    inputs = torch.ones(1, 2, 2)
    with record_calls(Slots(model := Branches())) as recording:
        gradient = torch.ones_like(model(inputs))
    calls = [site.call([inputs.detach()]) for site in recording.sites]
    first, second = (found.unpack(call, gradient)[0] for call in calls)
    assert first.arguments[0] is second.arguments[0]


def test_an_output_that_belongs_to_no_token_is_refused_with_the_module():
    with record_calls(Slots(layer := nn.Linear(3, 2))) as recording:
        output = layer(torch.ones(1, 5, 3).mean(dim=1))
    packing = pack_row([5], torch.device("cpu")).packing
    with pytest.raises(ValueError, match=r"module '' \(Linear\) returned shape \(1, 2\)"):
        measure_gradients(output.sum()[None], recording, packing=packing)


def test_an_argument_that_belongs_to_no_token_is_refused_by_name():
    model, packing = Scaled().double(), pack_row([5], torch.device("cpu")).packing
    with record_calls(Slots(model)) as recording:
        output = model(torch.ones(1, 5, 3).double(), torch.ones(5, 2).double())
    with pytest.raises(ValueError, match=r"argument 1 of module '' \(Scaled\) has shape \(5, 2\)"):
        measure_gradients(output.sum()[None], recording, packing=packing)
