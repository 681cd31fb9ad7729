import torch
from torch import nn

from tests.fixtures.learner.models import llama, seeded_model
from vcpo_learner.per_sample_gradients.slots import Slots


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
