import pytest
import torch
from torch import Tensor, nn

from tests.unit.update.models import (
    FAMILIES,
    PAD,
    VOCABULARY,
    llama,
    own_logprobs,
    sampled_groups,
    seeded,
    trajectory,
)
from vcpo_learner import gradient_norms
from vcpo_learner.batch import token_batch
from vcpo_learner.gradient_norms import squared_gradient_norms
from vcpo_learner.module_calls import recorded_calls
from vcpo_learner.scoring import mean_response_logprobs, token_logprobs

ONE_TWO = torch.tensor([1.0, 2.0]).double()


def batched_norms(model, trajectories):
    batch = token_batch(trajectories, PAD, torch.device("cpu"))
    with recorded_calls(model) as calls:
        logprobs = token_logprobs(model, batch, temperature=1.0)
    return squared_gradient_norms(model, mean_response_logprobs(logprobs, batch), calls)


def looped_norms(model, trajectories):
    return torch.stack([loop_norm(model, own_logprobs(model, one).mean()) for one in trajectories])


def loop_norm(model: nn.Module, objective: Tensor) -> Tensor:
    gradients = torch.autograd.grad(objective, list(model.parameters()), materialize_grads=True)
    return torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()


def recorded_norms(model, inputs, objectives=lambda output: output.flatten(1).square().sum(dim=1)):
    with recorded_calls(model) as calls:
        output = model(inputs)
    return squared_gradient_norms(model, objectives(output), calls)


def assert_module_agrees(model, inputs):
    expected = [loop_norm(model, model(one[None]).square().sum()) for one in inputs]
    torch.testing.assert_close(
        recorded_norms(model, inputs), torch.stack(expected), rtol=1e-9, atol=0.0
    )


def long_trajectories(model):
    responses = [tuple(1 + (7 * t + row) % (VOCABULARY - 1) for t in range(40)) for row in range(3)]
    return [trajectory(row, response=response) for row, response in enumerate(responses)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["f64", "f32"]
)
def test_norms_of_a_padded_batch_agree_with_one_backward_pass_each(family, dtype, tolerance):
    model = seeded(FAMILIES[family], dtype=dtype)
    trajectories = [one for group in sampled_groups(model) for one in group]
    expected = looped_norms(model, trajectories)
    torch.testing.assert_close(
        batched_norms(model, trajectories), expected, rtol=tolerance, atol=0.0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_of_sequences_too_long_for_token_matrices_agree_too(family):
    model = seeded(FAMILIES[family], dtype=torch.float64)
    trajectories = long_trajectories(model)
    expected = looped_norms(model, trajectories)
    torch.testing.assert_close(batched_norms(model, trajectories), expected, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("elements", [1, 1000])
def test_the_size_of_a_chunk_does_not_matter(monkeypatch, elements):
    model = seeded(FAMILIES["llama tied"], dtype=torch.float64)
    trajectories = [one for group in sampled_groups(model) for one in group]
    expected = batched_norms(model, trajectories)
    monkeypatch.setattr(gradient_norms, "_CHUNK_ELEMENTS", elements)
    torch.testing.assert_close(batched_norms(model, trajectories), expected, rtol=1e-12, atol=0.0)


def test_a_worked_linear_layer_has_the_norm_of_its_summed_outer_products():
    # Inputs (1,0),(1,2) and output gradients (1,1),(0,2): G = [[1,0],[3,4]], squared norm 26.
    layer = nn.Linear(2, 2, bias=False).double()
    inputs = torch.tensor([[[1.0, 0.0], [1.0, 2.0]]]).double()
    output_gradients = torch.tensor([[[1.0, 1.0], [0.0, 2.0]]]).double()
    norms = recorded_norms(
        layer, inputs, objectives=lambda output: (output * output_gradients).sum(dim=(1, 2))
    )
    assert norms.tolist() == [26.0]


def test_a_module_called_twice_counts_with_the_sum_of_its_gradients():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, inputs):
            return self.layer(torch.tanh(self.layer(inputs)))

    torch.manual_seed(0)
    assert_module_agrees(Twice().double(), torch.randn(4, 5, 3).double())


def test_a_module_with_parameters_beside_children_agrees_with_the_loop():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.scale = nn.Parameter(torch.randn(2))

        def forward(self, inputs):
            return self.layer(inputs) * self.scale

    torch.manual_seed(0)
    assert_module_agrees(Scaled().double(), torch.randn(4, 3).double())


def test_a_convolution_goes_through_its_own_forward():
    torch.manual_seed(0)
    assert_module_agrees(nn.Conv1d(2, 3, kernel_size=2).double(), torch.randn(4, 2, 5).double())


def test_one_token_per_trajectory_needs_no_token_axis():
    # The gradient is (2, 4) in the token's row.
    embedding = nn.Embedding(4, 2).double()
    norms = recorded_norms(
        embedding, torch.tensor([3, 1]), objectives=lambda output: 2.0 * (output @ ONE_TWO)
    )
    assert norms.tolist() == [20.0, 20.0]


def test_the_padding_row_of_an_embedding_has_no_gradient():
    embedding = nn.Embedding(4, 1, padding_idx=0).double()
    norms = recorded_norms(
        embedding, torch.tensor([[0, 0], [1, 0]]), objectives=lambda output: output.sum(dim=(1, 2))
    )
    assert norms.tolist() == [0.0, 1.0]


def test_frozen_parameters_do_not_count():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False)).double()
    model[0].requires_grad_(False)
    inputs = torch.tensor([[1.0, 2.0]]).double()
    (expected,) = model[0](inputs).square().sum(dim=1).tolist()
    norms = recorded_norms(model, inputs, objectives=lambda output: output.sum(dim=1))
    assert norms.tolist() == pytest.approx([expected], rel=1e-12)


def test_norms_leave_the_gradients_of_parameters_alone():
    model = seeded(llama)
    batched_norms(model, [trajectory(0), trajectory(1)])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_recording_ends_with_its_block():
    model = nn.Linear(2, 2)
    with recorded_calls(model) as calls:
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert len(calls) == 1


def test_a_module_without_the_batch_on_its_first_axis_is_named():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, inputs):
            return self.layer(inputs.transpose(0, 1)).transpose(0, 1)

    with pytest.raises(ValueError, match=r"module 'layer' \(Linear\) returned shape \(5, 4, 3\)"):
        recorded_norms(Transposed(), torch.randn(4, 5, 3))


def test_a_module_that_sees_no_trajectory_is_named():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2))

        def forward(self, size):
            return self.bias.expand(size, 2)

    with pytest.raises(ValueError, match=r"\(Constant\) has no argument with 4 entries"):
        recorded_norms(Constant(), 4)


def test_an_output_changed_in_place_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    with pytest.raises(ValueError, match=r"module '0' \(Linear\) had its input or output changed"):
        recorded_norms(model, torch.ones(3, 2))


def test_a_trainable_parameter_whose_module_was_not_called_is_refused():
    class Bypassed(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.bypassed = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, inputs):
            return nn.functional.linear(self.used(inputs), self.bypassed.weight)

    with pytest.raises(ValueError, match=r"'bypassed.weight' is trainable, but its module was not"):
        recorded_norms(Bypassed(), torch.ones(3, 2))


def test_an_embedding_scaled_by_frequency_is_refused():
    embedding = nn.Embedding(4, 2, scale_grad_by_freq=True)
    with pytest.raises(ValueError, match="scale_grad_by_freq or max_norm"):
        recorded_norms(embedding, torch.tensor([[1, 2]]))
