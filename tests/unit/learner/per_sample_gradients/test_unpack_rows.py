from random import Random

import pytest
import torch
from torch import Tensor, nn

from tests.fixtures.learner.models import FAMILIES, VOCABULARY, seeded_model
from tests.fixtures.learner.norms import summed
from vcpo_learner.per_sample_gradients import measurement as trajectory_gradients
from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import record_calls
from vcpo_learner.per_sample_gradients.unpack_rows import locate_tokens

ROWS = [[0, 3], [1, 4], [2]]
"""Trajectories of each row of the batch."""
LENGTHS = [3, 6, 5, 4, 2]
SLOPES = [0.7, -1.3]
GROUPS = [0, 0, 0, 1, 1]
BOTH_FORMS = pytest.mark.parametrize("kept", [True, False], ids=["kept", "reduced"])


def token_sequences() -> list[Tensor]:
    random = Random(0)
    return [torch.tensor(random.choices(range(1, VOCABULARY), k=length)) for length in LENGTHS]


def segments_of_rows() -> Tensor:
    rows = [torch.cat([torch.full((LENGTHS[number],), number) for number in row]) for row in ROWS]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def packed_tokens(segments: Tensor) -> Tensor:
    tokens = torch.zeros_like(segments)
    for number, sequence in enumerate(token_sequences()):
        tokens[segments == number] = sequence
    return tokens


def restarted_positions(segments: Tensor) -> Tensor:
    positions = torch.zeros_like(segments)
    for number, length in enumerate(LENGTHS):
        positions[segments == number] = torch.arange(length)
    return positions


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
    """Measured gradients of packed rows."""
    segments = segments_of_rows()
    tokens = packed_tokens(segments)
    inputs = {
        "attention_mask": block_diagonal(segments),
        "position_ids": restarted_positions(segments),
        "use_cache": False,
    }
    with record_calls(Slots(model)) as recording:
        logits = model(input_ids=tokens, **(inputs | changes)).logits
    objectives = torch.stack(
        [
            own_objective(logits[segments == number], tokens[segments == number])
            for number in range(len(LENGTHS))
        ]
    )
    return measure_gradients(objectives, recording, weighted_sum, segments=segments)


def objectives_alone(model) -> list[Tensor]:
    return [own_objective(model(each[None]).logits[0], each) for each in token_sequences()]


def squared_norm(model, objective: Tensor) -> float:
    gradients = torch.autograd.grad(objective, list(model.parameters()), materialize_grads=True)
    return sum(float(gradient.square().sum()) for gradient in gradients)


@BOTH_FORMS
@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2 tied"])
def test_norms_of_packed_rows_agree_with_one_backward_pass_each(monkeypatch, family, kept):
    monkeypatch.setattr(trajectory_gradients, "is_kept_cheaper", lambda *_: kept)
    model = seeded_model(FAMILIES[family], dtype=torch.float64)
    expected = [squared_norm(model, each) for each in objectives_alone(model)]
    assert measure_packed(model).squared_norms.tolist() == pytest.approx(expected, rel=1e-9)


@BOTH_FORMS
@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2 tied"])
def test_the_sum_over_packed_rows_is_that_of_one_backward_pass(monkeypatch, family, kept):
    monkeypatch.setattr(trajectory_gradients, "is_kept_cheaper", lambda *_: kept)
    model = seeded_model(FAMILIES[family], dtype=torch.float64)
    offsets = torch.linspace(-1.0, 1.0, len(LENGTHS)).double()
    coefficients = (offsets + torch.tensor(SLOPES, dtype=torch.float64)[GROUPS]).tolist()
    total = sum(c * f for c, f in zip(coefficients, objectives_alone(model), strict=True))
    expected = torch.autograd.grad(total, list(model.parameters()))
    measure_packed(model, summed(model, offsets, GROUPS)).add_to_parameters(SLOPES)
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


def token_wise_norms(model, inputs: Tensor, segments: Tensor, num_trajectories: int, shift=0.5):
    with record_calls(Slots(model)) as recording:
        by_token = model(inputs, shift).square().sum(dim=2)
    objectives = [by_token[segments == number].sum() for number in range(num_trajectories)]
    return measure_gradients(torch.stack(objectives), recording, segments=segments).squared_norms


def test_tokens_of_a_trajectory_may_lie_anywhere():
    torch.manual_seed(0)
    model, inputs = Scaled().double(), torch.randn(2, 5, 3).double()
    segments = torch.tensor([[1, 0, 1, -1, 2], [2, -1, 1, 2, 0]])
    expected = [
        squared_norm(model, model(inputs[segments == number], 0.5).square().sum())
        for number in range(3)
    ]
    assert token_wise_norms(model, inputs, segments, 3).tolist() == pytest.approx(expected)


def test_a_worked_row_of_two_trajectories():
    # Inputs (1, 2), then 3: gradients 1 + 2 and 3 with output gradients of 1.
    layer = nn.Linear(1, 1, bias=False).double()
    with record_calls(Slots(layer)) as recording:
        output = layer(torch.tensor([[[1.0], [2.0], [3.0]]]).double())
    objectives = torch.stack([output[0, :2].sum(), output[0, 2].sum()])
    segments = torch.tensor([[0, 0, 1]])
    found = measure_gradients(objectives, recording, segments=segments)
    assert found.squared_norms.tolist() == [9.0, 9.0]


def test_behind_a_shorter_trajectory_stands_its_first_token():
    found = locate_tokens(torch.tensor([[1, 1, 1, 0]]), 2)
    assert found.places.tolist() == [[3, 3, 3], [0, 1, 2]]
    assert found.is_own.tolist() == [[True, False, False], [True, True, True]]


def test_layers_side_by_side_share_their_unpacked_input():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, inputs):
            return self.left(inputs) + self.right(inputs)

    found = locate_tokens(torch.tensor([[0, 1]]), 2)
    inputs = torch.ones(1, 2, 2)
    with record_calls(Slots(model := Branches())) as recording:
        gradient = torch.ones_like(model(inputs))
    calls = [site.call([inputs.detach()]) for site in recording.sites]
    first, second = (found.unpack(call, gradient)[0] for call in calls)
    assert first.arguments[0] is second.arguments[0]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (torch.tensor([0, 1]), r"of shape \(2,\): give int64 of shape \[rows, tokens\]"),
        (torch.tensor([[0.0, 1.0]]), r"segments is torch.float32 .* give int64"),
        (torch.tensor([[0, 2]]), r"segments holds 2 for 2 objectives"),
        (torch.tensor([[0, 1, -2]]), r"segments holds -2 for 2 objectives"),
        (torch.tensor([[0, 0, -1]]), r"segments has no token of trajectory 1"),
    ],
)
def test_segments_that_make_no_sense_are_refused(segments, message):
    with pytest.raises(ValueError, match=message):
        locate_tokens(segments, 2)


def test_positions_shared_by_all_rows_are_refused_with_the_module():
    model = seeded_model(FAMILIES["gpt2"], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"module 'transformer.wpe' \(Embedding\) returned shape"):
        measure_packed(model, position_ids=torch.arange(8)[None])


def test_an_argument_that_belongs_to_no_token_is_refused_by_name():
    shift = torch.ones(5, 2).double()
    with pytest.raises(ValueError, match=r"argument 1 of module '' \(Scaled\) has shape \(5, 2\)"):
        token_wise_norms(
            Scaled().double(), torch.ones(1, 5, 3).double(), torch.zeros(1, 5).long(), 1, shift
        )


def test_padding_that_a_trajectory_sees_is_refused():
    model = seeded_model(FAMILIES["llama"], dtype=torch.float64)
    width = segments_of_rows().shape[1]
    everything = torch.zeros(len(ROWS), 1, width, width).double()
    with pytest.raises(ValueError, match=r"a trajectory depends on padding; mask it"):
        measure_packed(model, attention_mask=everything)
