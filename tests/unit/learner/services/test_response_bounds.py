"""The bounds of a response; each refusal names its field."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.fixtures.learner.dispatcher import make_partial_response, make_run, make_trajectory
from tests.fixtures.learner.models import gpt2, llama
from vcpo.local.models import context_tokens
from vcpo.service.vocabulary import num_tokens
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.packing import ExpertRoutes, RouterLayout
from vcpo_learner.services.bounds import ResponseBounds

BOUNDS = ResponseBounds(
    vocabulary_size=23, max_new_tokens=6, context_tokens=7, max_absolute_reward=10.0
)
ROUTERS = RouterLayout(num_layers=2, num_choices=1, num_experts=4)
ROUTES = ExpertRoutes(experts=bytes((0, 3)), num_layers=2, num_choices=1)


def bounds_of(run, model):
    return ResponseBounds.from_spec(
        run.spec,
        vocabulary_size=num_tokens(model),
        model_context_tokens=context_tokens(model.config.to_dict()),
    )


def make_one(**changes):
    """A trajectory of prompt (3, 4) and one sampled token, with some fields changed."""
    return replace(make_trajectory("lease", 0), **changes)


def of_length(num_tokens, **changes):
    return make_one(response_token_ids=(5,) * num_tokens, **changes)


@pytest.mark.parametrize(
    "trajectory",
    [
        make_one(),
        make_one(prompt_token_ids=(0, 22), response_token_ids=(22,)),
        of_length(5),
        of_length(6, prompt_token_ids=(3,)),
        make_one(reward=10.0),
        make_one(reward=-10.0),
    ],
    ids=["ordinary", "last token", "full context", "longest", "largest", "smallest"],
)
def test_what_is_at_the_bounds_is_accepted(trajectory):
    BOUNDS.check_trajectory(trajectory, path="t")


@pytest.mark.parametrize(
    ("routes", "problem"),
    [
        (replace(ROUTES, experts=bytes((0, 4))), "expert_routes.experts: must be 0 to 3, got 4"),
        (
            replace(ROUTES, num_layers=1),
            "expert_routes.num_layers: must be 2, the model's, got 1",
        ),
    ],
    ids=["expert", "layers"],
)
def test_routes_must_be_those_of_the_model(routes, problem):
    bounds = replace(BOUNDS, routers=ROUTERS)
    bounds.check_trajectory(make_one(expert_routes=ROUTES), path="t")
    with pytest.raises(InvalidMessageError) as error:
        bounds.check_trajectory(make_one(expert_routes=routes), path="t")
    assert str(error.value) == f"t.{problem}"


def test_routes_that_nobody_replays_are_refused():
    with pytest.raises(InvalidMessageError, match=r"none \(spec.algorithm.routerReplay"):
        BOUNDS.check_trajectory(make_one(expert_routes=ROUTES), path="t")


@pytest.mark.parametrize(
    ("trajectory", "problem"),
    [
        (make_one(prompt_token_ids=(3, 23)), "t.prompt_token_ids[1]: must be 0 to 22, got 23"),
        (make_one(response_token_ids=(99,)), "t.response_token_ids[0]: must be 0 to 22, got 99"),
        (
            of_length(7, prompt_token_ids=(3,)),
            "t.response_token_ids: must be at most 6 tokens (spec.sampling.maxNewTokens), got",
        ),
        (
            of_length(6),
            "t.response_token_ids: must be at most 7 tokens with the prompt (the model's context)",
        ),
        (make_one(reward=10.5), "t.reward: must be -10 to 10 (spec.environment.maxAbsoluteReward)"),
    ],
    ids=["prompt", "response", "too long", "context", "reward"],
)
def test_what_is_beyond_is_refused_by_the_name_of_its_field(trajectory, problem):
    with pytest.raises(InvalidMessageError) as caught:
        BOUNDS.check_trajectory(trajectory, path="t")
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("vocabulary_size", "partial", "problem"),
    [
        (
            None,
            make_partial_response(*[0] * 6),
            "b.token_ids: must be at most 6 tokens, and fewer unless",
        ),
        # Tokens of `make_partial_response` count up from 5.
        (8, make_partial_response(*[0] * 4), "b.token_ids[3]: must be 0 to 7, got 8"),
    ],
    ids=["nothing left to sample", "vocabulary"],
)
def test_a_partial_response_keeps_to_the_same_bounds(vocabulary_size, partial, problem):
    bounds = replace(BOUNDS, vocabulary_size=vocabulary_size, context_tokens=None)
    with pytest.raises(InvalidMessageError) as caught:
        bounds.check_partial_response(partial, path="b")
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_bounds_are_the_models_and_the_runs(make):
    run = make_run(
        sampling={"maxNewTokens": 5},
        environment={"name": "sort_digits", "maxAbsoluteReward": 2.5},
    )
    assert bounds_of(run, make()) == ResponseBounds(
        vocabulary_size=23, max_new_tokens=5, context_tokens=64, max_absolute_reward=2.5
    )


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_longest_response_that_fills_the_context_is_refused_at_the_start(make):
    with pytest.raises(ValueError, match=r"spec\.sampling\.maxNewTokens: leaves no room.*got 64"):
        bounds_of(make_run(sampling={"maxNewTokens": 64}), make())
    assert bounds_of(make_run(sampling={"maxNewTokens": 63}), make()).context_tokens == 64


def test_a_head_with_fewer_rows_than_the_embedding_bounds_the_tokens():
    heads = SimpleNamespace(
        get_input_embeddings=lambda: torch.nn.Embedding(32, 4),
        get_output_embeddings=lambda: torch.nn.Linear(4, 30),
    )
    assert num_tokens(heads) == 30
