"""Gradients that would be lost are named; those that do not exist are told from them."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from tests.fixtures.learner.models import (
    FAMILIES,
    PAD,
    llama,
    sampled_groups,
    seeded_model,
    trajectory,
)
from tests.fixtures.learner.norms import recorded_norms, summed
from tests.fixtures.learner.updates import make_spec
from vcpo.api.learner import ActivationCheckpointing
from vcpo_learner.forward.activation_checkpointing import set_checkpoints
from vcpo_learner.forward.logprobs import token_logprobs
from vcpo_learner.forward.token_batch import token_batch
from vcpo_learner.per_sample_gradients import measurement
from vcpo_learner.per_sample_gradients.backward import measure_gradients
from vcpo_learner.per_sample_gradients.coverage import LostGradientError, require_gradients
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.taps import record_calls
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum
from vcpo_learner.update.gradient import GradientAccumulation


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
@pytest.mark.parametrize("family", ["llama", "llama tied"])
def test_every_slot_of_a_sharded_model_arrives_with_autograds_sums(one_rank, family, checkpoints):
    model = seeded_model(FAMILIES[family])
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
def test_the_librarys_own_checkpoints_are_named_with_what_takes_their_place(is_reentrant):
    model = seeded_model(llama)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    model.enable_input_require_grads()
    with record_calls(Slots(model)) as recording:
        sums = model(torch.tensor([[3, 4, 5], [5, 4, 3]])).logits.sum(dim=(1, 2))
    with pytest.raises(ValueError, match=r"gradient_checkpointing_enable\(\) call set_checkpoints"):
        measure_gradients(sums, recording)
