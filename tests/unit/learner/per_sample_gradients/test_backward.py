import pytest
import torch
from torch import Tensor, nn

from tests.fixtures.learner.models import (
    EVERY_FAMILY,
    FAMILIES,
    HYBRIDS,
    PAD,
    VOCABULARY,
    llama,
    own_logprobs,
    sampled_groups,
    seeded_model,
    trajectory,
)
from tests.fixtures.learner.norms import recorded_norms, summed
from vcpo.api.learner import ActivationCheckpointing, Attention
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.forward.attention import select_attention
from vcpo_learner.forward.forward_pass import token_logprobs
from vcpo_learner.forward.token_batch import token_batch
from vcpo_learner.per_sample_gradients import measurement as trajectory_gradients
from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.factors import Factors, TokenProducts
from vcpo_learner.per_sample_gradients.layer_gradients import layer_gradients
from vcpo_learner.per_sample_gradients.mixers import uncalled_linear
from vcpo_learner.per_sample_gradients.module_calls import CallSite, is_mixer
from vcpo_learner.per_sample_gradients.slots import Slot, Slots
from vcpo_learner.per_sample_gradients.taps import record_calls
from vcpo_learner.per_sample_gradients.weighted_sum import relative_offsets

ONE_TWO = torch.tensor([1.0, 2.0]).double()


def measure(model, trajectories, weighted_sum=None, *, packs=False):
    batch = token_batch(trajectories, PAD, torch.device("cpu"), packs=packs)
    with record_calls(Slots(model)) as recording:
        logprobs = token_logprobs(model, batch, temperature=1.0)
    # A vector by row needs no second run of its mixer, which a kernel's backward pass forbids.
    mixers = [each for each in recording.sites if is_mixer(each.module)]
    assert all(each.is_of_mixer for each in mixers if uncalled_linear(each.module) is None)
    means = logprobs.sum(dim=1) / batch.response_mask.sum(dim=1)
    packing = None if batch.row is None else batch.row.packing
    return measure_gradients(means, recording, weighted_sum, packing=packing)


def batched_norms(model, trajectories):
    return measure(model, trajectories).squared_norms


def looped_norms(model, trajectories):
    return torch.stack([loop_norm(model, own_logprobs(model, one).mean()) for one in trajectories])


def loop_norm(model: nn.Module, objective: Tensor) -> Tensor:
    gradients = torch.autograd.grad(objective, list(model.parameters()), materialize_grads=True)
    return torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()


def assert_module_agrees(model, inputs):
    expected = [loop_norm(model, model(one[None]).square().sum()) for one in inputs]
    torch.testing.assert_close(
        recorded_norms(model, inputs), torch.stack(expected), rtol=1e-9, atol=0.0
    )


def long_trajectories(model):
    responses = [tuple(1 + (7 * t + row) % (VOCABULARY - 1) for t in range(40)) for row in range(3)]
    return [trajectory(row, response=response) for row, response in enumerate(responses)]


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
def test_norms_of_a_padded_batch_agree_with_one_backward_pass_each(family, dtype, tolerance):
    model = seeded_model(EVERY_FAMILY[family], dtype=dtype)
    trajectories = [one for group in sampled_groups(model) for one in group]
    expected = looped_norms(model, trajectories)
    torch.testing.assert_close(
        batched_norms(model, trajectories), expected, rtol=tolerance, atol=0.0
    )


@pytest.mark.parametrize(
    ("packs", "setting"),
    [(False, "none"), (False, "layers"), (True, "none"), (True, "layers")],
    ids=["padded", "padded again", "packed", "packed again"],
)
@pytest.mark.parametrize("family", HYBRIDS)
def test_norms_and_sum_of_mixers_agree_with_one_backward_pass_each(family, packs, setting):
    model = seeded_model(HYBRIDS[family])
    assert select_attention(model, Attention.AUTO, packs=packs) is packs
    trajectories = [trajectory(0), *long_trajectories(model)]
    expected = looped_norms(model, trajectories)
    means = torch.stack([own_logprobs(model, one).mean() for one in trajectories])
    offsets = torch.tensor([0.5, -1.0, 2.0, 0.25]).double()
    gradients = torch.autograd.grad((means * (offsets + 0.3)).sum(), list(model.parameters()))
    set_checkpoints(model, ActivationCheckpointing(setting))
    found = measure(model, trajectories, summed(model, offsets, [0] * 4), packs=packs)
    # The delta rule and the scan compute in float32.
    torch.testing.assert_close(found.squared_norms, expected, rtol=1e-5, atol=0.0)
    found.add_to_parameters([0.3])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        # A vector's terms cancel over tokens: 1.8e-5 on a processor with AVX2 alone.
        assert float((parameter.grad - gradient).norm() / gradient.norm()) < 5e-5


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


def test_a_convolution_goes_through_its_own_forward():
    torch.manual_seed(0)
    assert_module_agrees(nn.Conv1d(2, 3, kernel_size=2).double(), torch.randn(4, 2, 5).double())


class OnePlusWeight(nn.Module):
    """A normalization whose weight is counted from 1, as in Gemma."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, inputs):
        return nn.functional.rms_norm(inputs, (4,)) * (1.0 + self.weight)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4), OnePlusWeight])
def test_normalizations_agree_with_the_loop_even_at_a_weight_of_zero(make):
    torch.manual_seed(0)
    model = make().double()
    with torch.no_grad():
        model.weight[1:] = torch.randn(3)
        model.weight[0] = 0.0
    assert_module_agrees(
        nn.Sequential(model, nn.Linear(4, 2).double()), torch.randn(3, 5, 4).double()
    )


class Biased(nn.RMSNorm):
    def __init__(self):
        super().__init__(4)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, inputs):
        return super().forward(inputs) + self.bias


def test_a_normalization_agrees_when_its_bias_leaves_zero():
    torch.manual_seed(0)
    norm, inputs = Biased(), torch.randn(3, 5, 4).double()
    model = nn.Sequential(norm, nn.Linear(4, 2)).double()
    assert_module_agrees(model, inputs)
    nn.init.ones_(norm.bias)
    assert_module_agrees(model, inputs)


def test_normalizations_of_another_epsilon_are_not_measured_as_one():
    torch.manual_seed(0)
    inputs = torch.randn(3, 5, 4).double()
    layers = (layer for eps in (1e-6, 1.0, 1e-6) for layer in (nn.Linear(4, 4), nn.RMSNorm(4, eps)))
    model = nn.Sequential(*layers, nn.Linear(4, 2)).double()
    for _ in range(2):  # the first time tells what they are
        assert_module_agrees(model, inputs)


def test_one_token_per_trajectory_needs_no_token_axis():
    # The gradient is (2, 4) in the token's row.
    embedding = nn.Embedding(4, 2).double()
    norms = recorded_norms(
        embedding, torch.tensor([3, 1]), objectives=lambda output: 2.0 * (output @ ONE_TWO)
    )
    assert norms.tolist() == [20.0, 20.0]


class ScaledEmbedding(nn.Embedding):
    """As Gemma's."""

    def forward(self, token_ids):
        return super().forward(token_ids) * 3.0


class WeighingEmbedding(nn.Embedding):
    """Weighs features, so it is no scaled one."""

    def forward(self, token_ids):
        return super().forward(token_ids) * torch.tensor([1.0, 5.0])


@pytest.mark.parametrize("make", [ScaledEmbedding, WeighingEmbedding])
def test_an_embedding_with_a_forward_of_its_own_agrees(make):
    torch.manual_seed(0)
    assert_module_agrees(make(4, 2).double(), torch.tensor([[3, 1, 3], [0, 0, 2]]))


def test_a_scaled_embedding_has_factors():
    embedding, tokens = ScaledEmbedding(4, 2).double(), torch.tensor([[3, 1]])
    site = CallSite(
        name="embedding",
        module=embedding,
        arguments={0: tokens.shape},
        output_shape=(1, 2, 2),
        parameter_names=["weight"],
    )
    found = layer_gradients(site.call([tokens]), "weight", torch.ones(1, 2, 2).double()).factors
    assert found is not None
    assert found.rows.tolist() == tokens.tolist()
    assert found.columns.tolist() == [[[3.0, 3.0], [3.0, 3.0]]]


def test_products_of_embeddings_worked_by_hand():
    # Rows 3: (1,0)+(0,2)=(1,2) and (5,0); row 1: (4,4) and nothing. Own: 5+32, both: 5.
    first = Factors(
        rows=torch.tensor([[3, 1, 3]]), columns=torch.tensor([[[1.0, 0.0], [4.0, 4.0], [0.0, 2.0]]])
    )
    second = Factors(rows=torch.tensor([[3]]), columns=torch.tensor([[[5.0, 0.0]]]))
    assert first.inner_products(first, TokenProducts()).tolist() == [37.0]
    assert first.inner_products(second, TokenProducts()).tolist() == [5.0]


def test_the_padding_row_of_an_embedding_has_no_gradient():
    embedding = nn.Embedding(4, 1, padding_idx=0).double()
    norms = recorded_norms(
        embedding, torch.tensor([[0, 0], [1, 0]]), objectives=lambda output: output.sum(dim=(1, 2))
    )
    assert norms.tolist() == [0.0, 1.0]


def test_norms_leave_the_gradients_of_parameters_alone():
    model = seeded_model(llama)
    batched_norms(model, [trajectory(0), trajectory(1)])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_recording_ends_with_its_block():
    model = nn.Linear(2, 2)
    with record_calls(Slots(model)) as recording:
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert len(recording.sites) == 1


def test_a_pass_runs_the_forward_that_a_module_got_after_the_last_one():
    slots = Slots(model := nn.Linear(2, 2))
    with record_calls(slots):
        model(torch.ones(1, 2))
    model.forward = lambda inputs: 2.0 * inputs
    with record_calls(slots):
        assert model(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]


def test_equal_layers_with_inputs_of_one_shape_are_looked_at_once(monkeypatch):
    looked_at, look = [], trajectory_gradients.layer_gradients

    def counted(call, name, *given):
        looked_at.append((name, call.arguments[0].shape[1]))
        return look(call, name, *given)

    monkeypatch.setattr(trajectory_gradients, "layer_gradients", counted)
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2) for _ in range(4)]
    # Three layers see four tokens, and the last one two.
    model = nn.Sequential(*layers[:3], nn.Unflatten(1, (2, 2)), Mean(), layers[3]).double()
    assert_module_agrees(model, torch.randn(3, 4, 2).double())
    assert looked_at == [("weight", 2), ("bias", 2), ("weight", 4), ("bias", 4)]


class Mean(nn.Module):
    def forward(self, inputs):
        return inputs.mean(dim=2)


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


def test_an_output_changed_in_place_counts_as_the_module_returned_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)).double()
    assert_module_agrees(model, torch.randn(3, 2).double())


def test_an_input_changed_in_place_is_refused():
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Embedding(2, 1)

        def forward(self, inputs):
            output = self.layer(inputs)
            inputs.zero_()
            return output

    with pytest.raises(ValueError, match=r"'layer' \(Embedding\) had its input changed in place"):
        recorded_norms(Overwriting(), torch.ones(3, 2).long())


def test_an_embedding_scaled_by_frequency_is_refused():
    embedding = nn.Embedding(4, 2, scale_grad_by_freq=True)
    with pytest.raises(ValueError, match="scale_grad_by_freq or max_norm"):
        recorded_norms(embedding, torch.tensor([[1, 2]]))


class LoRA(nn.Module):
    """A frozen linear layer and a trained update of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


def with_lora() -> nn.Module:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj, rank=2)
    return model


def test_adapters_count_and_frozen_weights_do_not():
    model = seeded_model(with_lora, dtype=torch.float64)
    trajectories = [trajectory(0), trajectory(1, response=(8, 9))]
    expected = [trainable_norm(model, own_logprobs(model, one).mean()) for one in trajectories]
    torch.testing.assert_close(
        batched_norms(model, trajectories), torch.stack(expected), rtol=1e-9, atol=0.0
    )


def trainable_norm(model: nn.Module, objective: Tensor) -> Tensor:
    parameters = [each for each in model.parameters() if each.requires_grad]
    gradients = torch.autograd.grad(objective, parameters)
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()


GROUPS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
SLOPES = [0.7, -1.3, 0.2]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "reduced"])
def test_the_sum_is_that_of_one_backward_pass_with_the_same_coefficients(monkeypatch, family, kept):
    monkeypatch.setattr(trajectory_gradients, "is_kept_cheaper", lambda *_: kept)
    model = seeded_model(FAMILIES[family], dtype=torch.float64)
    trajectories = [one for group in sampled_groups(model) for one in group]
    offsets = torch.linspace(-1.0, 1.0, len(trajectories)).double()
    coefficients = offsets + torch.tensor(SLOPES, dtype=torch.float64)[GROUPS]
    total = sum(
        c * own_logprobs(model, one).mean()
        for c, one in zip(coefficients, trajectories, strict=True)
    )
    expected = torch.autograd.grad(total, list(model.parameters()))
    found = measure(model, trajectories, summed(model, offsets, GROUPS))
    found.add_to_parameters(SLOPES)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "reduced"])
def test_sums_of_several_batches_add_up(monkeypatch, kept):
    monkeypatch.setattr(trajectory_gradients, "is_kept_cheaper", lambda *_: kept)
    model = seeded_model(llama, dtype=torch.float64)
    once = measure(model, [trajectory(0)], summed(model, torch.ones(1), [0]))
    once.add_to_parameters([0.5])
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    again = measure(model, [trajectory(0)], summed(model, torch.ones(1), [0]))
    again.add_to_parameters([0.5])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, 2.0 * gradient, rtol=1e-9, atol=1e-12)


def test_offsets_are_relative_to_the_most_frequent_where_weights_are_alike():
    assert relative_offsets([-1.0, 0.0, -1.0], [1.0] * 3) == [0.0, 1.0, 0.0]


def test_offsets_are_relative_to_that_of_a_trajectory_which_outweighs_the_others():
    assert relative_offsets([-1.0, 0.5, -1.0], [1e-9, 1.0, 1e-9]) == [-1.5, 0.0, -1.5]


def test_trajectories_measured_one_by_one_have_the_norms_and_sum_of_one_go(monkeypatch):
    monkeypatch.setattr(trajectory_gradients, "is_kept_cheaper", lambda *_: False)
    gradients = []
    for elements in (1, 1 << 20):
        monkeypatch.setitem(trajectory_gradients._CHUNK_ELEMENTS, "cpu", elements)
        model = seeded_model(llama, dtype=torch.float64)
        trajectories = [one for group in sampled_groups(model) for one in group]
        weighted_sum = summed(model, torch.arange(12.0).double(), GROUPS)
        found = measure(model, trajectories, weighted_sum)
        found.add_to_parameters(SLOPES)
        flat = [each.grad.flatten() for each in model.parameters()]
        gradients.append(torch.cat([found.squared_norms, *flat]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


def test_short_sequences_are_kept_and_long_ones_reduced():
    # 2 tokens: 4 * 16 multiplications against 3 * 24 * 64 elements; 200 tokens: 40,000 * 16.
    weight = Slot(name="weight", shape=torch.Size((8, 8)))

    def factors(tokens):
        rows = torch.zeros(1, tokens, 8)
        return [trajectory_gradients.Factors(rows=rows, columns=rows)]

    assert trajectory_gradients.is_kept_cheaper(weight, factors(2))
    assert not trajectory_gradients.is_kept_cheaper(weight, factors(200))
