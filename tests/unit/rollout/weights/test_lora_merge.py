import pytest
import torch

from vcpo_rollout.engines.engine import EngineError
from vcpo_rollout.weights.postprocess import LoraMerge

BASE = {"a.weight": torch.zeros(3, 2), "a.bias": torch.ones(3), "norm.weight": torch.ones(2)}
FIRST, SECOND = "a.lora_A.default.weight", "a.lora_B.default.weight"
ADAPTERS = {
    FIRST: torch.tensor([[1.0, 2.0]]),
    SECOND: torch.tensor([[1.0], [0.0], [-1.0]]),
}


def merge(**given):
    return LoraMerge(base=BASE, scale=0.5)({**ADAPTERS, **given}, 7)


def test_the_product_is_added_to_its_layer_and_nothing_else_changes():
    merged = merge()
    assert merged["a.weight"].tolist() == [[0.5, 1.0], [0.0, 0.0], [-0.5, -1.0]]
    assert merged.keys() == BASE.keys()
    assert all(torch.equal(merged[name], BASE[name]) for name in ("a.bias", "norm.weight"))


def test_the_next_version_starts_from_the_base_again():
    assert torch.equal(merge()["a.weight"], merge()["a.weight"])
    assert not BASE["a.weight"].any()


def test_types_stay_those_of_the_base():
    base = {name: each.to(torch.bfloat16) for name, each in BASE.items()}
    merged = LoraMerge(base=base, scale=0.5)(ADAPTERS, 7)
    assert {each.dtype for each in merged.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"b.lora_A.default.weight": torch.ones(1, 2)}, "b.lora_B.default.weight is missing"),
        (
            {
                "b.lora_A.default.weight": torch.ones(1, 2),
                "b.lora_B.default.weight": torch.ones(3, 1),
            },
            "b.weight: the model has no parameter that fits",
        ),
        ({SECOND: torch.ones(4, 1)}, "a.weight: the model has no parameter that fits"),
        ({SECOND: torch.ones(3, 2)}, "a.weight: the model has no parameter that fits"),
        ({"a.weight": torch.ones(3, 2)}, "a.weight is not an adapter"),
    ],
)
def test_what_does_not_belong_to_the_model_is_refused_by_name(given, message):
    with pytest.raises(EngineError, match=message):
        merge(**given)
