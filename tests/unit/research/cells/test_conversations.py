"""Multi-turn responses of a cell, on the tiny model and a task of two turns."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from research.cells.cell import Cell
from research.cells.experiment import run_cell
from research.cells.sampling import Sampler
from research.cells.versions import Version, policy_tensors
from tests.unit.research.echo import REPLY, EchoConversation
from vcpo.api import VCPORunSpec
from vcpo_learner.model.loading import load_policy, pad_token_id
from vcpo_rollout.environments import Split, make_environment
from vcpo_rollout.generation.environment_pool import EnvironmentFailedError

TINY = str(Path(__file__).resolve().parents[4] / "examples" / "models" / "tiny")
TASK = "tests.unit.research.echo:Echo"
LONGEST = 16
SPEC = VCPORunSpec.model_validate(
    {
        "model": {"name": "tiny"},
        "environment": {"name": TASK},
        "algorithm": {"method": "vcpo"},
        "steps": 3,
        "batch": {"promptsPerStep": 4, "trajectoriesPerPrompt": 4},
        "sampling": {"maxNewTokens": LONGEST},
        "evaluation": {"everySteps": 3, "prompts": 5},
    }
)


@functools.cache
def policy():
    model, tokenizer = load_policy(TINY, None)
    return policy_tensors(model), tokenizer


def sampled(seed=0):
    weights, tokenizer = policy()
    sampler = Sampler(
        SPEC.model_copy(update={"seed": seed}), TINY, tokenizer, pad_token_id(tokenizer)
    )
    sampler.use(Version(number=3, weights=weights))
    task = make_environment(TASK, {}, 0)
    prompts = sampler.prompts(task, Split.TRAIN, range(6))
    return sampler.groups(task, prompts, samples=4, temperature=1.0)


def test_the_reply_stands_between_the_turns_and_is_not_trained_on():
    _, tokenizer = policy()
    responses = [each for group in sampled() for each in group]
    replied = [each for each in responses if each.inserted_spans]
    assert len(replied) > 5
    for each in replied:
        (span,) = each.inserted_spans
        inserted = each.response_token_ids[span.start : span.start + span.num_tokens]
        assert tokenizer.decode(inserted) == REPLY
        assert len(each.rollout_logprobs) == len(each.response_token_ids) - span.num_tokens
        assert {part.policy_version for part in each.version_spans} == {3}


def test_the_same_seed_holds_the_same_conversations():
    assert sampled(seed=1) == sampled(seed=1)
    assert sampled(seed=1) != sampled(seed=2)


def test_the_learner_scores_both_turns_as_they_were_sampled():
    cell = Cell(method="vcpo", lag=0, learning_rate=1e-3, seed=0, spec=SPEC, evaluation_seed=0)
    record = run_cell(cell, TINY)
    assert record.steps.ess_ratio == pytest.approx([1.0] * 3, rel=1e-6)
    stale = run_cell(replace(cell, lag=2), TINY)
    assert stale.steps.ess_ratio[-1] < 1.0 - 1e-7


def test_an_environment_that_cannot_judge_ends_the_cell_with_its_error(monkeypatch):
    monkeypatch.setattr(EchoConversation, "next_turn", lambda *_: 1 / 0)
    with pytest.raises(EnvironmentFailedError, match="ZeroDivisionError"):
        sampled()
