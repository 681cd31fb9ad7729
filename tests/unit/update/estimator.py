"""The estimator written out by hand, one trajectory at a time, and a look at what an update did."""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

import torch
from torch import Tensor, nn

from tests.unit.update.models import PAD, own_logprobs
from vcpo.spec import VCPORunSpec
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.update.policy_update import PolicyUpdate

CAP = 1.5


def make_spec(
    *, baseline: str = "opob", temperature: float = 1.0, **algorithm: object
) -> VCPORunSpec:
    """Settings under which Adam's first moment after one step is the gradient itself."""
    return VCPORunSpec.model_validate(
        {
            "model": {"name": "tiny"},
            "environment": {"name": "countdown"},
            "steps": 1,
            "algorithm": {
                "baseline": baseline,
                "importanceWeightCap": CAP,
                "onPolicyEssRatio": 1.0,
                **algorithm,
            },
            "sampling": {"temperature": temperature},
            "optimizer": {"learningRate": 1e-3, "beta1": 0.0, "maxGradientNorm": 1e6},
        }
    )


def with_micro_batches(spec: VCPORunSpec, size: int) -> VCPORunSpec:
    batch = spec.batch.model_copy(update={"micro_batch_trajectories": size})
    return spec.model_copy(update={"batch": batch})


def gradient_of_step(
    model: nn.Module, spec: VCPORunSpec, groups: Sequence[Sequence[Trajectory]]
) -> Tensor:
    """The gradient that one step used, flat, in the optimizer's order of parameters."""
    update = PolicyUpdate(model, spec, PAD)
    assert update.step(groups, policy_version=9).skipped is None
    return first_moments(update)


def first_moments(update: PolicyUpdate) -> Tensor:
    state = update.state_dict()["optimizer"]["state"]
    return torch.cat([state[index]["exp_avg"].flatten() for index in sorted(state)])


def expected_gradient(
    model: nn.Module,
    groups: Sequence[Sequence[Trajectory]],
    baseline: str,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """-(1/B) sum_i A_i grad f_i with f_i = min(w_i, c) * (1/L_i) sum_t log pi."""
    total = torch.zeros(())
    for group in groups:
        contributions = [contribution(model, one, temperature=temperature) for one in group]
        squared_norms = [float(gradient @ gradient) for gradient in contributions]
        rewards = [one.reward for one in group]
        for advantage, gradient in zip(
            by_hand(baseline, rewards, squared_norms), contributions, strict=True
        ):
            total = total - advantage * gradient
    return total / sum(len(group) for group in groups)


def contribution(model: nn.Module, one: Trajectory, *, temperature: float = 1.0) -> Tensor:
    """grad f_i, flat, in the optimizer's order: matrices first."""
    logprobs = own_logprobs(model, one, temperature=temperature)
    log_weight = float(logprobs.detach().double().sum()) - math.fsum(one.rollout_logprobs)
    weight = min(math.exp(log_weight), CAP)
    parameters = sorted(model.parameters(), key=lambda parameter: parameter.ndim < 2)
    gradients = torch.autograd.grad(weight * logprobs.mean(), parameters)
    return torch.cat([gradient.flatten() for gradient in gradients])


def by_hand(baseline: str, rewards: list[float], squared_norms: list[float]) -> list[float]:
    """Advantages of one group."""
    size, mean = len(rewards), fmean(rewards)
    match baseline:
        case "opob":
            products = [n * reward for n, reward in zip(squared_norms, rewards, strict=True)]
            return [reward - sum(products) / sum(squared_norms) for reward in rewards]
        case "groupMean":
            return [reward - mean for reward in rewards]
        case "rloo":
            return [reward - (size * mean - reward) / (size - 1) for reward in rewards]
        case "grpo":
            return [(reward - mean) / pstdev(rewards) for reward in rewards]
        case _:
            return rewards
