"""The page on loops of one's own: its step of a causal model, as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from vcpo.api.learner import ActivationCheckpointing
from vcpo_learner.forward.activation_checkpointing import set_checkpoints

LENGTHS = [5, 3, 4, 2]


def the_pages_step(model, optimizer):
    page = Path("docs/library.md").read_text()
    code = re.search(r"one backward pass each:\n\n```python\n(.*?)```", page, re.DOTALL)[1]
    names = {"model": model, "optimizer": optimizer}
    exec(code, names)
    return names["step"]


@pytest.mark.parametrize("checkpoints", list(ActivationCheckpointing))
def test_its_gradient_is_that_of_one_backward_pass_a_trajectory(checkpoints):
    model = AutoModelForCausalLM.from_pretrained("examples/models/tiny")
    model.train()
    tokens = torch.randint(3, 12, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).float()
    logprobs = model(tokens).logits[:, :-1].log_softmax(-1)
    chosen = logprobs.gather(2, tokens[:, 1:, None])[..., 0]
    rewards = torch.tensor([[1.0, 0.0], [0.25, 0.5]])

    # On policy all weights are 1, and A = R - b* with b* = sum(n R) / sum(n) over the batch.
    terms = (chosen * mask).sum(1) / mask.sum(1)
    each = [torch.autograd.grad(term, model.parameters(), retain_graph=True) for term in terms]
    norms = torch.stack([sum(part.square().sum() for part in one) for one in each])
    advantages = rewards.flatten() - (norms * rewards.flatten()).sum() / norms.sum()
    set_checkpoints(model, checkpoints)
    step = the_pages_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    report = step(tokens, mask, chosen.detach(), rewards, torch.zeros(4))
    assert report.ess_ratio == pytest.approx(1.0)
    assert 0.0 < report.rate < 0.1
    for parameter, parts in zip(model.parameters(), zip(*each, strict=True), strict=True):
        wanted = -sum(a * part for a, part in zip(advantages, parts, strict=True)) / 4
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-6)
