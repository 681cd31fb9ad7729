"""An engine of the user's own: how its class is found, and what its answers must be."""

from __future__ import annotations

import asyncio
import math
import sys
from types import SimpleNamespace

import pytest

from vcpo.api import VCPORunSpec
from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo_rollout.engines.checked import CheckedEngine
from vcpo_rollout.engines.engine import (
    EngineError,
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
    PolicyWeights,
)
from vcpo_rollout.engines.factory import _load, find_engine

OWN_ENGINE = """
class Own:
    policy_version = context_tokens = stop_strings = None
    end_token_ids = frozenset()
    @classmethod
    def load(cls, *, setting, depth=1):
        if depth == 0:
            raise RuntimeError("no depth")
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
REQUEST = GenerationRequest(prompt_token_ids=(4,), temperature=1.0, max_new_tokens=3)
BEGUN = PartialResponse(
    token_ids=(9,), logprobs=(-0.5,), version_spans=(VersionSpan(policy_version=1, num_tokens=1),)
)


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
        ("os:getcwd", {}, ["it is no class", "load, generate, swap_weights and close"]),
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


class Answering:
    """Answers with what it is told; a swap takes effect, and waits for `gate` if there is one."""

    context_tokens = stop_strings = None
    end_token_ids = frozenset()

    def __init__(self, answer=None, *, version=None) -> None:
        self.policy_version = version
        self.answer = answer
        self.gate = None

    async def generate(self, request, *, interrupt=None):
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def swap_weights(self, weights):
        self.policy_version = weights.policy_version
        return 0


def generation(*spans, token_ids=(5, 6), logprobs=(-1.0, -2.0)):
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        version_spans=tuple(VersionSpan(policy_version=v, num_tokens=n) for v, n in spans),
        finish_reason=FinishReason.STOP,
    )


async def test_an_answer_that_keeps_the_contract_is_passed_on():
    answer = generation((2, 2), logprobs=(0.0, -40.0))
    assert await CheckedEngine(Answering(answer, version=2)).generate(REQUEST) is answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "generate returned None, which is no Generation"),
        (ZeroDivisionError("by 0"), "Answering.generate: ZeroDivisionError: by 0"),
        (generation((2, 2), logprobs=(-1.0,)), "1 log-probabilities for 2 tokens"),
        (generation((2, 2), logprobs=(-1.0, 0.5)), "the log-probability 0.5, outside -100 to 0"),
        (generation((2, 2), logprobs=(math.nan, -1.0)), "the log-probability nan"),
        (generation((2, 3)), "version spans over 3 tokens for 2 tokens"),
        (generation((1, 1), (2, 1)), "tokens of version 1; only [2] were in use"),
        (generation((2, 4), token_ids=(5,) * 4, logprobs=(-1.0,) * 4), "4 tokens, not 1 to 3"),
        (generation(token_ids=(), logprobs=()), "0 tokens, not 1 to 3"),
    ],
)
async def test_an_answer_that_breaks_the_contract_fails_with_class_method_and_value(answer, words):
    with pytest.raises(EngineError, match=r"^Answering") as failed:
        await CheckedEngine(Answering(answer, version=2)).generate(REQUEST)
    assert words in str(failed.value)


async def test_a_resumed_response_keeps_its_tokens_and_their_older_version():
    request = GenerationRequest(
        prompt_token_ids=(4,), temperature=1.0, max_new_tokens=3, partial_response=BEGUN
    )
    kept = generation((1, 1), (2, 1), token_ids=(9, 5))
    assert await CheckedEngine(Answering(kept, version=2)).generate(request) is kept
    lost = generation((1, 1), (2, 1), token_ids=(8, 5))
    with pytest.raises(EngineError, match="other tokens than those of the partial response"):
        await CheckedEngine(Answering(lost, version=2)).generate(request)


@pytest.mark.parametrize(
    ("spans", "logprobs", "words"),
    [
        (((2, 2),), (-1.0,), "interrupted with 1 log-probabilities for 2 tokens"),
        (((7, 2),), (-1.0, -2.0), "interrupted with tokens of version 7; only [2] were in use"),
    ],
)
async def test_an_interrupted_answer_keeps_the_contract_too(spans, logprobs, words):
    partial = PartialResponse(
        token_ids=(5, 6),
        logprobs=logprobs,
        version_spans=tuple(VersionSpan(policy_version=v, num_tokens=n) for v, n in spans),
    )
    engine = CheckedEngine(Answering(GenerationInterruptedError(partial), version=2))
    with pytest.raises(EngineError, match=r"^Answering") as failed:
        await engine.generate(REQUEST)
    assert words in str(failed.value)


async def test_versions_that_came_during_the_call_may_label_its_tokens_also_older_ones():
    # A restarted learner goes on from a checkpoint, with a smaller number.
    engine = Answering(generation((7, 1), (3, 1)), version=7)
    engine.gate = asyncio.Event()
    checked = CheckedEngine(engine)
    running = asyncio.create_task(checked.generate(REQUEST))
    await asyncio.sleep(0)
    await checked.swap_weights(PolicyWeights.whole(3, b""))
    engine.gate.set()
    assert await running is engine.answer
    engine.answer = generation((7, 2))
    with pytest.raises(EngineError, match=r"tokens of version 7; only \[3\]"):
        await checked.generate(REQUEST)


async def test_a_swap_that_leaves_another_version_in_use_ends_the_engine():
    engine = Answering(version=2)
    engine.swap_weights = lambda weights: asyncio.sleep(0, result=0)
    with pytest.raises(EngineError, match="policy_version is 2 instead of 3"):
        await CheckedEngine(engine).swap_weights(PolicyWeights.whole(3, b""))
