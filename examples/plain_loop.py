"""VCPO in a plain torch loop: an old copy of the policy samples, and the learner corrects for it.

    python examples/plain_loop.py

The policy is shown a digit and writes four; the reward is the share of them that are the digit.
"""

from __future__ import annotations

import copy
from collections import deque

import torch
from torch import Tensor, nn

from vcpo.torch import StepRule, truncated_weights, vcpo2_advantages

LAG, PROMPTS, GROUP, LENGTH, DIGITS = 4, 8, 8, 4, 10


class Policy(nn.Module):
    """Log-probabilities of four digits, given one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIGITS, 32), nn.Tanh(), nn.Linear(32, LENGTH * DIGITS))

    def forward(self, prompts: Tensor) -> Tensor:
        """Return [B, LENGTH, DIGITS] log-probabilities for [B] prompts."""
        shown = nn.functional.one_hot(prompts, DIGITS).float()
        return self.net(shown).view(-1, LENGTH, DIGITS).log_softmax(-1)


def train(steps: int = 100, rate: float = 3e-2) -> list[float]:
    """Return the mean reward of each step's batch."""
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate)
    rule = StepRule(optimizer, max_lag_steps=LAG)
    copies: deque[Policy] = deque(maxlen=LAG + 1)
    rewards_of_steps = []
    for step in range(steps):
        # Sampling, by the oldest copy: in an asynchronous run this is another process.
        copies.append(copy.deepcopy(policy))
        prompts = torch.randint(DIGITS, (PROMPTS,)).repeat_interleave(GROUP)
        with torch.no_grad():
            behavior = copies[0](prompts)
            responses = torch.distributions.Categorical(logits=behavior).sample()
            rollout_logprobs = behavior.gather(-1, responses[..., None]).squeeze(-1)
        rewards = (responses == prompts[:, None]).float().mean(-1)

        # Learning: a weight and a gradient norm a trajectory, one baseline and one rate a batch.
        logprobs = policy(prompts).gather(-1, responses[..., None]).squeeze(-1)
        log_weights = (logprobs.detach() - rollout_logprobs).sum(-1)
        terms = truncated_weights(log_weights) * logprobs.mean(-1)
        each = torch.eye(len(terms))  # the gradient of every term by itself
        gradients = torch.autograd.grad(
            terms, list(policy.parameters()), each, retain_graph=True, is_grads_batched=True
        )
        norms = torch.stack([one.flatten(1).square().sum(1) for one in gradients]).sum(0)
        groups = (PROMPTS, GROUP)
        advantages = vcpo2_advantages(rewards.view(groups), norms.view(groups), log_weights)
        optimizer.zero_grad()
        (-(advantages.flatten() * terms).mean()).backward()
        report = rule.step(log_weights, torch.full_like(rewards, len(copies) - 1))

        rewards_of_steps.append(rewards.mean().item())
        if step % 20 == 0:
            print(f"{step:4} reward {rewards_of_steps[-1]:.2f} ESS {report.ess_ratio:.2f}")
    return rewards_of_steps


if __name__ == "__main__":
    torch.manual_seed(0)
    train()
