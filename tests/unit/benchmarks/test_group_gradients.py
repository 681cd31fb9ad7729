"""One group's gradient under several baselines, by hand and against the learner's update."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.harness.group_gradients import (
    NAMES,
    GroupGradients,
    factors,
    gradients_of_each,
    group_gradients,
    with_other_baselines,
)
from vcpo.api import VCPORunSpec
from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan
from vcpo_learner.forward.logprobs import token_logprobs
from vcpo_learner.forward.token_batch import token_batch
from vcpo_learner.model.loading import load_policy
from vcpo_learner.update.policy_update import PolicyUpdate

TINY = str(Path(__file__).resolve().parents[3] / "examples" / "models" / "tiny")
CPU = torch.device("cpu")
RESPONSES = ((5, 9, 14), (21, 8), (33, 40, 7, 12), (5, 9, 1))
ROLLOUT_LOGPROBS = ((-0.1, -9.0, -2.0), (-3.0, -3.0), (-4.0, -1.0, -6.0, -5.0), (-2.0, -3.0, -4.0))
REWARDS = (1.0, 0.0, 0.5, 1.0)


def group() -> list[Trajectory]:
    return [
        Trajectory(
            trajectory_id=str(index),
            prompt_token_ids=(11, 12, 13),
            response_token_ids=response,
            rollout_logprobs=logprobs,
            version_spans=(VersionSpan(policy_version=0, num_tokens=len(response)),),
            reward=reward,
            finish_reason=FinishReason.STOP,
        )
        for index, (response, logprobs, reward) in enumerate(
            zip(RESPONSES, ROLLOUT_LOGPROBS, REWARDS, strict=True)
        )
    ]


def estimates_of(rewards: list[float], norms: list[float], row: list[float]) -> GroupGradients:
    """A group whose gradient without baseline is 1, and whose mean h is that of `row`."""
    estimates = torch.tensor([[1.0, 1.0]] * (len(NAMES) - 1) + [row])
    return GroupGradients(
        rewards=rewards, squared_norms=norms, log_weights=[0.0] * len(norms), estimates=estimates
    )


def test_gradients_come_one_by_one():
    parameters = [nn.Parameter(torch.tensor([2.0, 3.0])), nn.Parameter(torch.tensor(5.0))]
    first, second = parameters
    objectives = torch.stack([first[0] * second, first[1] ** 2])
    rows = gradients_of_each(objectives, parameters)
    assert rows.tolist() == [[5.0, 0.0, 2.0], [0.0, 6.0, 0.0]]


def test_every_baseline_gives_its_factors():
    by_name = dict(zip(NAMES, factors([1.0, 0.0, 0.0], [1.0, 3.0, 4.0]), strict=True))
    assert by_name["none"] == [1.0, 0.0, 0.0]
    assert by_name["groupMean"] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert by_name["rloo"] == pytest.approx([1.0, -0.5, -0.5])
    assert by_name["opob"] == pytest.approx([7 / 8, -1 / 8, -1 / 8])
    # 0 of the other two; 1 / (1 + 4) without the second; 1 / (1 + 3) without the third.
    assert by_name["opobOfOthers"] == pytest.approx([1.0, -0.2, -0.25])
    assert by_name["opobOfOtherGroups"] == [1.0, 1.0, 1.0]


def test_weights_are_truncated_before_norms_are_taken():
    parameter = nn.Parameter(torch.zeros(2))
    found = group_gradients(
        torch.tensor([[3.0, 0.0], [0.0, 1.0]]) @ parameter,
        [parameter],
        rewards=[1.0, 1.0],
        log_weights=[math.log(0.5), math.log(100.0)],
        weight_cap=8.0,
    )
    assert found.squared_norms == pytest.approx([1.5**2, 8.0**2])
    assert found.estimates[NAMES.index("none")].tolist() == pytest.approx([0.75, 4.0])


def test_a_group_gets_the_optimal_baseline_of_the_other_groups():
    groups = [
        estimates_of([0.0, 1.0], [3.0, 1.0], [2.0, 0.0]),
        estimates_of([1.0, 0.0], [1.0, 1.0], [0.0, 4.0]),
    ]
    last = with_other_baselines(groups)[:, NAMES.index("opobOfOtherGroups")]
    # b* is 1 / 2 of the second group and 1 / 4 of the first.
    assert last.tolist() == [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize("name", ["none", "groupMean", "rloo", "opob"])
def test_an_estimate_is_the_gradient_that_the_learner_steps_along(name):
    model, _ = load_policy(TINY, None)
    batch = token_batch(group(), 0, CPU)
    logprobs = token_logprobs(model, batch, temperature=1.0)
    found = group_gradients(
        logprobs.sum(dim=1) / torch.tensor([len(response) for response in RESPONSES]),
        list(model.parameters()),
        rewards=REWARDS,
        log_weights=[
            sum(learner) - sum(rollout)
            for learner, rollout in zip(logprobs.tolist(), ROLLOUT_LOGPROBS, strict=True)
        ],
        weight_cap=8.0,
    )
    expected = learner_gradient_norm(model, name)
    assert found.estimates[NAMES.index(name)].norm().item() == pytest.approx(expected, rel=1e-4)


def learner_gradient_norm(model: nn.Module, baseline: str) -> float:
    spec = VCPORunSpec.model_validate(
        {
            "model": {"name": "tiny"},
            "environment": {"name": "sort_digits"},
            "steps": 1,
            "algorithm": {"baseline": baseline, "onPolicyEssRatio": 1.0},
            "batch": {"promptsPerStep": 1, "trajectoriesPerPrompt": len(RESPONSES)},
        }
    )
    result = PolicyUpdate(model, spec, 0).step([group()], policy_version=0)
    assert result.skipped is None
    return result.gradient_norm
