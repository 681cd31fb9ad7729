"""An engine of the user's own: how its class is found, and what becomes of its errors."""

import asyncio
import copy
import sys
from types import SimpleNamespace

import pytest

from tests.fixtures.rollout.tokenizers import byte_level
from vcpo.api import VCPORunSpec
from vcpo_rollout.engines.engine import EngineError, GenerationRequest
from vcpo_rollout.engines.factory import _load, find_engine, load_engine
from vcpo_rollout.engines.weight_plan import WeightPlan
from vcpo_rollout.generation.group_sampling import complete_response

OWN_ENGINE = """
class Own:
    policy_version = context_tokens = stop_strings = None
    end_token_ids = frozenset()
    @classmethod
    def load(cls, *, setting, depth=1):
        if depth == 0:
            raise RuntimeError("no depth")
        cls.end_token_ids = getattr(setting, "end_token_ids", None)
        return object() if depth < 0 else cls()
    async def generate(self, request, *, interrupt=None): ...
    async def swap_weights(self, weights): ...
    async def close(self): ...

class Halt:
    def load(self, *, setting): ...
    async def generate(self, request, *, interrupt=None): ...

class Instance(Own):
    def load(self, *, setting): ...
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_engine.py").write_text(OWN_ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_engine", None)


def spec_of(engine: str, **arguments: object) -> VCPORunSpec:
    groups = [{"name": "a"}, {"name": "b", "engine": engine, "engineArguments": arguments}]
    return VCPORunSpec.model_validate(
        {"model": {"name": "m"}, "environment": {"name": "countdown"}, "steps": 1,
         "rollouts": groups}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "arguments", "words"),
    [
        ("no_such_package:Own", {}, ["'no_such_package:Own' cannot be imported"]),
        ("own_engine:Owm", {}, ["has no attribute 'Owm'", "check the spelling"]),
        ("os:getcwd", {}, ["(not a class)", "load, generate, swap_weights and close"]),
        ("own_engine:Halt", {}, ["it has no swap_weights and no close"]),
        ("own_engine:Instance", {}, ["its `load` must be a class method"]),
        ("own_engine:Own", {"dept": 2}, ["engineArguments: {'dept': 2}", "known parameters are d"]),
    ],
)
def test_a_class_that_is_no_engine_is_named_with_its_field_and_the_cure(engine, arguments, words):
    spec = spec_of(engine, **arguments)
    with pytest.raises(ValueError, match=r"^spec\.rollouts\[1\]\.engine") as refused:
        find_engine(spec, spec.rollouts[1])
    assert all(word in str(refused.value) for word in words)


def test_an_engine_ends_a_response_where_the_chat_template_ends_a_turn(tmp_path):
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    spec = spec_of("own_engine:Own")
    model = spec.model.model_copy(update={"name": str(tmp_path)})
    spec = spec.model_copy(update={"model": model})
    engine, _ = load_engine(spec, spec.rollouts[1], WeightPlan(), seed=0)
    assert tokenizer.convert_ids_to_tokens(sorted(engine.end_token_ids)) == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("depth", "words"),
    [
        (0, "'own_engine:Own' cannot be loaded (RuntimeError: no depth); correct the class or"),
        (-1, "which has no policy_version, no context_tokens, no end_token_ids, no stop_strings"),
    ],
)
def test_what_load_cannot_make_is_named_with_its_field(depth, words):
    spec = spec_of("own_engine:Own", depth=depth)
    group = spec.rollouts[1]
    with pytest.raises(ValueError, match=r"^spec\.rollouts\[1\]\.engine: ") as refused:
        _load(find_engine(spec, group), SimpleNamespace(spec=spec, group=group))
    assert words in str(refused.value)


class Failing:
    async def generate(self, request, *, interrupt=None):
        raise ZeroDivisionError("by 0")


async def test_any_error_of_generate_is_the_engines_and_names_class_method_and_type():
    request = GenerationRequest(prompt_token_ids=(4,), temperature=1.0, max_new_tokens=3)
    with pytest.raises(EngineError, match=r"^Failing.generate: ZeroDivisionError: by 0"):
        await complete_response(Failing(), request, asyncio.Event())
