"""VCPO in a plain torch loop: an old copy of the policy samples, and the learner corrects for it.

    python examples/plain_loop.py

The policy is shown a digit and writes four; the reward is the share of them that are the digit.
"""

import copy
from collections import deque

import torch
from torch import nn

from vcpo.torch import StepRule, truncated_weights, vcpo2_advantages

LAG, PROMPTS, GROUP, LENGTH, DIGITS = 4, 8, 8, 4, 10


def make_policy() -> nn.Module:
    """Return a policy: from the digit shown, [B], log-probabilities, [B, LENGTH, DIGITS]."""
    written = (nn.Linear(32, LENGTH * DIGITS), nn.Unflatten(-1, (LENGTH, DIGITS)))
    return nn.Sequential(nn.Embedding(DIGITS, 32), nn.Tanh(), *written, nn.LogSoftmax(-1))


def train(steps: int = 100, rate: float = 3e-2) -> list[float]:
    """Return the mean reward of each step's batch."""
    policy, copies, rewards_of_steps = make_policy(), deque(maxlen=LAG + 1), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate)
    rule = StepRule(optimizer, max_lag_steps=LAG)
    for step in range(steps):
        # Sampling, by the oldest copy: in an asynchronous run this is another process.
        copies.append(copy.deepcopy(policy))
        prompts = torch.randint(DIGITS, (PROMPTS,)).repeat_interleave(GROUP)
        with torch.no_grad():
            behavior = copies[0](prompts)
            responses = torch.distributions.Categorical(logits=behavior).sample()
            rollout_logprobs = behavior.gather(-1, responses[..., None]).squeeze(-1)
        rewards = (responses == prompts[:, None]).float().mean(-1).view(PROMPTS, GROUP)

        # Learning: a weight and a gradient norm a trajectory, one baseline and one rate a batch.
        logprobs = policy(prompts).gather(-1, responses[..., None]).squeeze(-1)
        log_weights = (logprobs.detach() - rollout_logprobs).sum(-1)
        terms = truncated_weights(log_weights) * logprobs.mean(-1)
        each, parameters = torch.eye(len(terms)), list(policy.parameters())
        gradients = torch.autograd.grad(terms, parameters, each, True, is_grads_batched=True)
        norms = torch.stack([one.flatten(1).square().sum(1) for one in gradients]).sum(0)
        advantages = vcpo2_advantages(rewards, norms.view_as(rewards), log_weights)
        optimizer.zero_grad()
        (-(advantages.flatten() * terms).mean()).backward()
        lags = torch.full((len(terms),), len(copies) - 1)
        report = rule.step(log_weights, lags, -rollout_logprobs.mean())

        rewards_of_steps.append(rewards.mean().item())
        if step % 20 == 0:
            print(f"{step:4} reward {rewards_of_steps[-1]:.2f} ESS {report.ess_ratio:.2f}")
    return rewards_of_steps


if __name__ == "__main__":
    torch.manual_seed(0)
    train()
