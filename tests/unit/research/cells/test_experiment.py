"""One cell on the tiny model."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from research.cells.cell import Cell
from research.cells.experiment import Experiment, run_cell
from research.cells.versions import drawn_ages, policy_tensors
from research.study import Ages
from tests.unit.research.echo import Echo
from vcpo.api import VCPORunSpec
from vcpo.api.workloads import Precision, RolloutNoise

TINY = str(Path(__file__).resolve().parents[4] / "examples" / "models" / "tiny")
SPEC = VCPORunSpec.model_validate(
    {
        "model": {"name": "tiny"},
        "environment": {"name": "sort_digits", "parameters": {"digits": 5, "style": "plain"}},
        "steps": 5,
        "batch": {"promptsPerStep": 2, "trajectoriesPerPrompt": 8},
        "sampling": {"maxNewTokens": 8},
        "optimizer": {"learningRate": 1e-3},
        "evaluation": {"everySteps": 2, "prompts": 5},
    }
)


def cell_with(lag: int) -> Cell:
    return Cell(method="vcpo", lag=lag, learning_rate=1e-3, seed=0, spec=SPEC, evaluation_seed=0)


def test_without_lag_behavior_and_target_policy_agree_in_every_step():
    record = run_cell(cell_with(0), TINY)
    assert record.steps.ess == pytest.approx([16.0] * 5, rel=1e-4)


ADAPTERS = {"name": "tiny", "lora": {"rank": 2, "targetModules": ["q_proj", "v_proj"]}}


def test_a_cell_of_adapters_keeps_them_alone_and_samples_with_what_the_learner_computes():
    document = SPEC.model_dump(mode="json", by_alias=True, exclude_unset=True)
    spec = VCPORunSpec.model_validate(document | {"model": ADAPTERS})
    cell = replace(cell_with(2), spec=spec)
    experiment = Experiment(cell, TINY)
    updates, evaluations = experiment.run()
    # Three layers, of 2 linear maps each, with two factors each of 2 x 64 numbers.
    (first, *_, last) = experiment._versions.since(2)
    sizes = {name: each.numel() for name, each in last.weights.items()}
    assert len(sizes) == 12
    assert set(sizes.values()) == {2 * 64}
    assert any(not torch.equal(first.weights[name], last.weights[name]) for name in sizes)
    # The first batch is of the policy that takes the step: merged and unmerged weights agree.
    assert updates[0].log_weights == pytest.approx([0.0] * 16, abs=1e-4)
    assert updates[-1].log_weights != pytest.approx([0.0] * 16, abs=1e-4)
    assert len(evaluations) == 4


def test_with_lag_they_part_from_the_second_step_on():
    steps = run_cell(cell_with(2), TINY).steps
    assert steps.ess[0] == pytest.approx(16.0, rel=1e-4)
    # 16 trajectories; the ESS is that of their weights, whatever the update reads.
    assert 1.0 <= steps.ess[-1] < 15.99


def test_a_cell_run_twice_has_the_same_numbers():
    first, second = (run_cell(cell_with(1), TINY) for _ in range(2))
    assert replace(first, cpu_s=0.0) == replace(second, cpu_s=0.0)


TWO_TURNS = {"name": f"{Echo.__module__}:{Echo.__name__}", "parameters": {}}


def break_version(monkeypatch, broken):
    """Make the parameters NaN before a version is published."""
    versions = itertools.count()

    def published(model):
        if next(versions) == broken:
            next(model.parameters()).data.fill_(math.nan)
        return policy_tensors(model)

    monkeypatch.setattr("research.cells.experiment.policy_tensors", published)


@pytest.mark.parametrize("task", [{}, TWO_TURNS], ids=["one turn", "two turns"])
@pytest.mark.parametrize(
    # At lag 2 version 1 still samples for version 3, whose step is refused.
    ("lag", "taken", "refused"),
    [(0, 3, []), (2, 4, [4])],
)
def test_a_policy_without_finite_logits_is_wrong_from_there_to_the_end(
    monkeypatch, task, lag, taken, refused
):
    environment = SPEC.environment.model_copy(update=task)
    cell = replace(cell_with(lag), spec=SPEC.model_copy(update={"environment": environment}))
    whole = run_cell(cell, TINY)
    break_version(monkeypatch, 3)
    record = run_cell(cell, TINY)
    assert record.evaluations[:2] == whole.evaluations[:2]
    assert [(row.step, row.accuracy) for row in record.evaluations[2:]] == [(4, 0.0), (5, 0.0)]
    assert len(record.steps.ess_ratio) == taken
    weightless = [step for step, ess in enumerate(record.steps.ess, 1) if ess is None]
    assert weightless == refused


def sampled_at_step(step, ages, **group):
    """The groups of a step of a cell whose data is up to 4 versions old."""
    rollouts = (SPEC.rollouts[0].model_copy(update=group),)
    cell = replace(cell_with(4), ages=ages, spec=SPEC.model_copy(update={"rollouts": rollouts}))
    experiment = Experiment(cell, TINY)
    for version in range(step):
        experiment.publish()
        experiment.step(version, experiment.sample(version))
    experiment.publish()
    return experiment, experiment.sample(step)


def test_each_group_is_of_the_version_that_was_drawn_for_it_and_has_its_prompt():
    drawn = drawn_ages(Ages(shares=(0.0, 0.5, 1.0)), 4, seed=SPEC.seed, step=4, num_groups=2)
    _, groups = sampled_at_step(4, Ages(shares=(0.0, 0.5, 1.0)))
    versions = [
        {span.policy_version for each in group for span in each.version_spans} for group in groups
    ]
    assert versions == [{4 - age} for age in drawn]
    _, fixed = sampled_at_step(4, None)
    assert [group[0].prompt_token_ids for group in groups] == [
        group[0].prompt_token_ids for group in fixed
    ]


def test_newer_versions_take_over_within_a_response_up_to_the_newest():
    _, groups = sampled_at_step(4, Ages(shares=(0.5,), tokensPerVersion=2))
    spans = max(
        (each.version_spans for group in groups for each in group),
        key=lambda found: sum(span.num_tokens for span in found),
    )
    # Version 2, 2 versions old, then 3, and 4 for the rest.
    assert [(span.policy_version, span.num_tokens) for span in spans[:2]] == [(2, 2), (3, 2)]
    assert [span.policy_version for span in spans[2:]] == [4]


def test_a_sampler_in_bfloat16_is_near_the_learner_and_not_it():
    experiment, groups = sampled_at_step(0, None, precision=Precision.BFLOAT16)
    result = experiment.step(0, groups)
    largest = max(map(abs, result.log_weights))
    # Equal numbers would leave 1e-5; each of up to 8 tokens differs by about 0.004.
    assert 1e-3 < largest < 0.3


def test_noise_on_the_sampler_is_calibrated_on_responses_of_the_newest_version():
    noise = RolloutNoise(initialSigma=0.2, finalSigma=0.2, stages=1000)
    experiment, _ = sampled_at_step(4, None, noise=noise)
    result = experiment.step(4, experiment.sample(4))
    assert result.on_policy_ess_ratio < 0.97
    assert result.calibration_age_steps == 0
