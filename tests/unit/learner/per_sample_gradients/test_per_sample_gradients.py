"""Gradients that would be lost are named; those that do not exist are told from them."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.fixtures.learner.models import (
    FAMILIES,
    HYBRIDS,
    MIXTURES,
    PAD,
    llama,
    sampled_groups,
    seeded_model,
    trajectory,
)
from tests.fixtures.learner.norms import recorded_norms, summed
from tests.fixtures.learner.updates import expected_gradient, gradient_of_step, make_spec
from vcpo.api.algorithm import RowLayout
from vcpo.api.learner import ActivationCheckpointing
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.forward.forward_pass import token_logprobs
from vcpo_learner.forward.token_batch import token_batch
from vcpo_learner.per_sample_gradients import measurement
from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.factors import Factors, TokenProducts, as_factor, product
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import (
    LostGradientError,
    record_calls,
    require_gradients,
)
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum
from vcpo_learner.update.gradient import GradientAccumulation


def test_trajectories_without_any_gradient_have_the_norm_zero():
    layer, inputs = nn.Linear(3, 20).double(), torch.ones(2, 6, 3).double()
    norms = recorded_norms(layer, inputs, lambda output: (0.0 * output).sum(dim=(1, 2)))
    assert norms.tolist() == [0.0, 0.0]


class Sharing(nn.Module):
    """One matrix under two names, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2, bias=False) for _ in range(3))
        self.second.weight = self.first.weight
        self.third.requires_grad_(False)


def test_slots_are_named_in_the_order_of_the_model():
    model = seeded_model(llama)
    expected = [(name, each.shape) for name, each in model.named_parameters()]
    assert [(slot.name, slot.shape) for slot in Slots(model)] == expected


def test_a_tied_parameter_is_one_slot_under_its_first_name():
    model = Sharing()
    (slot,) = slots = Slots(model)
    assert slot.name == "first.weight"
    assert slots.of(model.first) == slots.of(model.second) == {"weight": slot}


def test_a_frozen_parameter_has_no_slot_and_its_module_is_not_listed():
    model = Sharing()
    assert Slots(model).of(model.third) == {}
    assert [name for name, _ in Slots(model).modules()] == ["first", "second"]


def test_a_slot_finds_the_parameter_that_its_module_has_now():
    model = Sharing()
    (slot,) = slots = Slots(model)
    model.first.weight = nn.Parameter(torch.ones(2, 2))
    assert slots.parameter(slot) is model.first.weight


BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def rounded(values):
    """In float64, as bfloat16 holds them."""
    return values.to(BF16).double()


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "reduced"])
def test_under_autocast_norm_and_sum_are_of_what_the_forward_pass_multiplied(monkeypatch, kept):
    monkeypatch.setattr(measurement, "is_kept_cheaper", lambda *_: kept)
    torch.manual_seed(0)
    layer, inputs = nn.Linear(8, 6, bias=False), torch.randn(3, 5, 8)
    output_gradients = torch.randn(3, 5, 6)
    with torch.autocast("cpu", dtype=BF16), record_calls(Slots(layer)) as recording:
        output = layer(inputs)
    assert output.dtype is BF16
    objectives = (output * output_gradients.to(BF16)).float().sum(dim=(1, 2))
    offsets = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    measured = measure_gradients(objectives, recording, summed(layer, offsets, [0, 0, 0]))
    measured.add_to_parameters([0.25])
    each = rounded(output_gradients).mT @ rounded(inputs)
    expected = each.square().sum(dim=(1, 2))
    torch.testing.assert_close(measured.squared_norms, expected, rtol=1e-6, atol=0.0)
    total = ((offsets + 0.25)[:, None, None] * each).sum(dim=0)
    assert layer.weight.grad.dtype is F32
    # A kept factor's sum is rounded once, like that of a plain backward pass.
    tolerance = 0.05 if kept else 1e-5
    torch.testing.assert_close(layer.weight.grad.double(), total, rtol=tolerance, atol=tolerance)


def test_factors_of_bfloat16_stay_in_it_and_their_products_have_the_digits_of_float32():
    found = as_factor(torch.tensor([1.0 + 2.0**-9]), BF16, F32)
    assert found.dtype is BF16
    assert found.tolist() == [1.0]  # bfloat16 has 8 digits of 2
    torch.manual_seed(0)
    first, second = torch.randn(2, 64, 96).to(BF16), torch.randn(2, 96, 80).to(BF16)
    expected = first.double() @ second.double()
    torch.testing.assert_close(product(first, second).double(), expected, rtol=1e-5, atol=1e-4)


def test_a_sum_of_factors_of_bfloat16_keeps_its_digits_until_it_is_complete():
    torch.manual_seed(0)
    rows, columns = torch.randn(3, 40, 64).to(BF16), torch.randn(3, 40, 48).to(BF16)
    coefficients = torch.tensor([1 / 3, -0.7, 1e-3], dtype=F64)[:, None, None]
    each = rows.double().mT @ columns.double()
    expected = (coefficients * each).sum(dim=0)
    total, factors = torch.zeros(64, 48), Factors(rows=rows, columns=columns)
    factors.add_weighted_to(total, coefficients)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
    factors.add_weighted_to(total, -coefficients, is_complete=True)
    assert 0.0 < float(total.abs().max()) < 2.0**-7 * float(expected.abs().max())


def test_a_product_of_two_types_has_the_better_one():
    first, second = torch.ones(1, 2, 3, dtype=F32), torch.ones(1, 3, 2, dtype=F64)
    assert product(first, second).dtype is F64


def test_norms_of_bfloat16_parameters_keep_the_digits_of_float32():
    # 257 tokens of gradient 1: bfloat16 cannot count beyond 256.
    layer = nn.Linear(1, 1).to(BF16)
    with record_calls(Slots(layer)) as recording:
        output = layer(torch.ones(1, 257, 1, dtype=BF16))
    objectives = output.sum(dim=(1, 2), dtype=F32)
    measured = measure_gradients(objectives, recording)
    assert measured.squared_norms.tolist() == pytest.approx([2 * 257.0**2], rel=1e-14)


def test_neighbors_that_share_their_input_share_its_products():
    shared, other = torch.randn(1, 3, 2), torch.randn(1, 3, 2)
    products = TokenProducts()
    first = products.of(shared, shared)
    assert products.of(shared.detach(), shared.detach()) is first
    assert products.of(other, other) is not first


def test_inner_products_of_factors_are_those_of_full_gradients():
    torch.manual_seed(0)
    one, other = (
        Factors(rows=torch.randn(2, 4, 3).double(), columns=torch.randn(2, 4, 5).double())
        for _ in range(2)
    )
    expected = (one.full(3) * other.full(3)).sum(dim=(1, 2))
    torch.testing.assert_close(one.inner_products(other, TokenProducts()), expected)


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
    packing = None if batch.row is None else batch.row.packing
    found = measure_gradients(
        objectives, recording, summed(model, offsets, groups), packing=packing
    )
    found.add_to_parameters(slopes.tolist())
    for slot, gradient in zip(slots, expected, strict=True):
        distance = float((slots.parameter(slot).grad - gradient).norm() / gradient.norm())
        assert distance < 1e-5, slot.name


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("layout", [RowLayout.PADDED, RowLayout.PACKED])
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


@pytest.fixture
def one_rank():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


class TakenSums:
    """Takes whole sums slot by slot, as shards of them are taken."""

    keeps_factors = False
    num_groups = 1

    def __init__(self):
        self.open = {}
        self.taken = {}

    def _buffers(self, slot):
        empty = torch.zeros(slot.shape), torch.zeros(1, *slot.shape)
        return self.open.setdefault(slot, empty)

    def weighted_sums(self, slots):
        return [self._buffers(slot)[0] for slot in slots]

    def by_groups(self, slots):
        return [self._buffers(slot)[1] for slot in slots]

    def close(self, slot):
        assert slot.name not in self.taken
        weighted, by_group = self._buffers(slot)
        del self.open[slot]
        self.taken[slot.name] = weighted, by_group[0]


def test_the_sum_of_a_sharded_model_is_not_lost_without_a_word(one_rank):
    model = seeded_model(llama)
    groups = sampled_groups(model)
    accumulation = GradientAccumulation(sharded(model), make_spec(), PAD)
    with pytest.raises(ValueError, match="is sharded: its gradient's sum would be lost"):
        accumulation.score(groups, policy_version=0)


@pytest.mark.parametrize("checkpoints", ["none", "layers"])
@pytest.mark.parametrize("family", ["llama", "llama tied", "qwen3_5_text", "falcon_h1"])
def test_every_slot_of_a_sharded_model_arrives_with_autograds_sums(one_rank, family, checkpoints):
    model = seeded_model((FAMILIES | HYBRIDS)[family])
    batch = token_batch([trajectory(0), trajectory(1, response=(8, 9))], PAD, torch.device("cpu"))
    offsets = torch.tensor([0.5, -2.0])
    means = token_logprobs(model, batch, temperature=1.0).sum(dim=1)
    names = [name for name, _ in model.named_parameters()]
    expected = [
        torch.autograd.grad((means * weights).sum(), list(model.parameters()), retain_graph=True)
        for weights in (offsets, torch.ones(2))
    ]
    slots = Slots(model)
    set_checkpoints(model, ActivationCheckpointing(checkpoints))
    sharded(model)
    sums = TakenSums()
    with record_calls(slots) as recording:
        objectives = token_logprobs(model, batch, temperature=1.0).sum(dim=1)
    weighted_sum = WeightedSum(offsets=offsets.double(), groups=[0, 0], sums=sums)
    measure_gradients(objectives, recording, weighted_sum)
    assert sorted(sums.taken) == sorted(names)
    for name, *gradients in zip(names, *expected, strict=True):
        for found, gradient in zip(sums.taken[name], gradients, strict=True):
            torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)


def order_of_slots(model, trajectories):
    slots, sums = Slots(model), TakenSums()
    batch = token_batch(trajectories, PAD, torch.device("cpu"))
    with record_calls(slots) as recording:
        objectives = token_logprobs(model, batch, temperature=1.0).sum(dim=1)
    offsets = torch.ones(len(trajectories)).double()
    weighted_sum = WeightedSum(offsets=offsets, groups=[0] * len(trajectories), sums=sums)
    measure_gradients(objectives, recording, weighted_sum)
    return list(sums.taken)


def test_all_ranks_close_slots_in_one_order_whatever_they_hold(monkeypatch):
    model = seeded_model(llama)
    few = order_of_slots(model, [trajectory(0)])
    monkeypatch.setattr(measurement, "is_kept_cheaper", lambda *_: False)
    monkeypatch.setitem(measurement._CHUNK_ELEMENTS, "cpu", 2000)
    assert order_of_slots(model, [trajectory(at) for at in range(3)]) == few


class Experts(nn.Module):
    """Two experts, of which a batch may use one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, inputs):
        return self.experts[0](inputs)


def test_an_expert_without_a_token_has_no_gradient_and_loses_none():
    model = Experts()
    with record_calls(slots := Slots(model)) as recording:
        objectives = model(torch.ones(3, 2)).sum(dim=1)
    measured = measure_gradients(objectives, recording, summed(model, torch.ones(3), [0, 0, 0]))
    measured.add_to_parameters([0.0])
    assert {slot.name for slot in measured.unused} == {"experts.1.weight"}
    assert model.experts[1].weight.grad is None
    require_gradients(slots, measured.unused)


def test_a_module_whose_output_is_not_used_has_no_gradient_either():
    class Ignored(Experts):
        def forward(self, inputs):
            self.experts[1](inputs)
            return self.experts[0](inputs)

    # Both rows of the used matrix have the gradient (1, 1).
    norms = recorded_norms(Ignored(), torch.ones(3, 2), lambda output: output.sum(dim=1))
    assert norms.tolist() == [4.0, 4.0, 4.0]


class Bypassed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.bypassed = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs):
        return nn.functional.linear(self.used(inputs), self.bypassed.weight)


def test_a_parameter_that_is_used_outside_of_its_module_is_named():
    with pytest.raises(LostGradientError, match=r"gradient of 'bypassed.weight' was lost: it is"):
        recorded_norms(Bypassed(), torch.ones(3, 2))


def test_a_use_that_was_announced_and_never_arrives_is_named():
    model = Bypassed()
    slots = Slots(model)
    with record_calls(slots) as recording:
        recording.expect(slots.of(model.bypassed)["weight"])
        objectives = model(torch.ones(3, 2)).sum(dim=1)
    with pytest.raises(LostGradientError, match=r"gradient of 'bypassed.weight' was lost: its use"):
        measure_gradients(objectives, recording)


def test_parameters_without_a_gradient_are_counted_and_three_of_them_named():
    model = seeded_model(llama)
    with pytest.raises(LostGradientError, match=r"'model.embed_tokens.weight', '.*', '.*' and 18"):
        require_gradients(Slots(model), unused=())


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_the_librarys_own_checkpoints_are_an_error_and_no_wrong_number(is_reentrant):
    model = seeded_model(llama)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    model.enable_input_require_grads()
    with record_calls(Slots(model)) as recording:
        sums = model(torch.tensor([[3, 4, 5], [5, 4, 3]])).logits.sum(dim=(1, 2))
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint"):
        measure_gradients(sums, recording)
