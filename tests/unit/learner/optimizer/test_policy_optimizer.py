import copy

import pytest
import torch
from torch import nn

from tests.fixtures.learner.models import llama, seeded_model
from vcpo.api.learner import Optimizer, OptimizerName
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer

RATE = 0.1
NAMES = list(OptimizerName)


def settings(**fields):
    adam = {"weightDecay": 0.5, "betas": [0.8, 0.7], "epsilon": 1e-6}
    return Optimizer.model_validate({"learningRate": RATE, **adam, **fields})


def optimizer_of(model, **fields):
    return PolicyOptimizer(model, settings(**fields))


def fill_gradients(model, value):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def random_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def wide():
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 96))


def test_a_trained_parameter_costs_sixteen_bytes():
    model = llama()
    optimizer = optimizer_of(model)
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step(RATE)
    held = [tensor for one in model.parameters() for tensor in (one, one.grad)]
    held += [
        moment
        for parts in optimizer.moments().values()
        for name, moment in parts.items()
        if name != "step"  # one number for each tensor
    ]
    num_parameters = sum(one.numel() for one in model.parameters())
    assert sum(each.numel() * each.element_size() for each in held) == 16 * num_parameters


@pytest.mark.parametrize("name", NAMES)
def test_matrices_decay_with_the_scaled_rate_and_vectors_do_not(name):
    model = wide()
    fill_gradients(model, 0.0)
    before = copy.deepcopy(model)
    optimizer_of(model, name=name).step(RATE, 0.5)
    torch.testing.assert_close(model[0].weight, before[0].weight * (1 - 0.05 * 0.5))
    assert torch.equal(model[0].bias, before[0].bias)


def test_the_second_step_of_adam_has_the_constants_of_the_spec():
    # Gradients 1 and 3. m = 0.8 * 0.2 + 0.2 * 3 = 0.76, over 1 - 0.8^2; v = 0.7 * 0.3 + 0.3 * 9 =
    # 2.91, over 1 - 0.7^2.
    model = nn.LayerNorm(1)
    optimizer = optimizer_of(model)
    for gradient in (1.0, 3.0):
        before = float(model.bias.detach())
        fill_gradients(model, gradient)
        optimizer.step(RATE)
    expected = before - RATE * (0.76 / 0.36) / (2.91 / 0.51) ** 0.5
    assert float(model.bias.detach()) == pytest.approx(expected, rel=1e-5)


def test_muon_turns_matrices_of_layers_and_leaves_the_rest_to_adam():
    model = seeded_model(llama)
    random_gradients(model, 1)
    before = copy.deepcopy(model)
    optimizer_of(model, name="muon", weightDecay=0.0, epsilon=1e-12).step(RATE)
    old = dict(before.named_parameters())
    for name, parameter in model.named_parameters():
        move = old[name].detach() - parameter.detach()
        if "proj" in name:
            # All directions move alike, by 0.2 sqrt(larger side) times the rate; the iteration
            # leaves singular values between 0.68 and 1.21.
            sizes = torch.linalg.svdvals(move) / (0.2 * max(move.shape) ** 0.5 * RATE)
            assert 0.6 < float(sizes.min()) <= float(sizes.max()) < 1.3, name
        else:
            torch.testing.assert_close(move, RATE * parameter.grad.sign())


def test_tied_embeddings_are_left_to_adam_once():
    model = llama(tied=True)
    optimizer = optimizer_of(model, name="muon")
    random_gradients(model, 1)
    optimizer.step(RATE)
    assert set(optimizer.moments()["model.embed_tokens.weight"]) == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_scaled_step_puts_the_base_rate_back(name):
    model = wide()
    optimizer = optimizer_of(model, name=name)
    random_gradients(model, 1)
    optimizer.step(0.25, 0.5)
    assert {group["lr"] for group in optimizer._groups()} == {0.25}


@pytest.mark.parametrize("name", NAMES)
def test_allocating_moments_moves_nothing(name):
    model = wide()
    before = flat(model)
    optimizer = optimizer_of(model, name=name)
    optimizer.allocate_moments()
    assert torch.equal(flat(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_copied_moments_continue_bit_for_bit(name):
    model = wide()
    optimizer = optimizer_of(model, name=name)
    random_gradients(model, 1)
    optimizer.step(RATE)
    twin = copy.deepcopy(model)
    resumed = optimizer_of(twin, name=name)
    resumed.allocate_moments()
    for parameter, parts in resumed.moments().items():
        for part, tensor in parts.items():
            tensor.copy_(optimizer.moments()[parameter][part])
    for each, its_optimizer in ((model, optimizer), (twin, resumed)):
        random_gradients(each, 2)
        its_optimizer.step(RATE)
    assert torch.equal(flat(twin), flat(model))


def test_frozen_parameters_have_no_moments():
    model = wide()
    model[0].requires_grad_(False)
    optimizer = optimizer_of(model)
    optimizer.allocate_moments()
    assert set(optimizer.moments()) == {"1.weight", "1.bias"}


def test_a_frozen_model_is_refused():
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        optimizer_of(nn.Linear(2, 1).requires_grad_(False))
