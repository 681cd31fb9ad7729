"""Random heads, and the numbers that autograd computes from full logits."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vcpo_learner.output_head.logit_tiles import LogitForm, TileSize
from vcpo_learner.output_head.tiled_head import HeadRequest

HIDDEN = 6
VOCABULARY = 37
FORMS = {
    "plain": LogitForm(),
    "Granite": LogitForm(scale=1 / 3),
    "Cohere": LogitForm(scale=0.5),
    "Gemma": LogitForm(softcap=2.0),
    "scaled and capped": LogitForm(scale=3.0, softcap=1.5),
}


@dataclass(frozen=True)
class Case:
    """A head, hidden states and sampled tokens; three trajectories one after another."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    lengths: list[int]
    weights: Tensor

    def call(self, form: LogitForm = FORMS["plain"], **settings) -> HeadRequest:
        size = TileSize(tokens=4, vocabulary=10)
        given = {"temperature": 0.7, "size": size, **settings}
        return HeadRequest(targets=self.targets, form=form, **given)

    def leaves(self) -> "Case":
        """The same with leaves that need a gradient."""
        bias = None if self.bias is None else self.bias.clone().requires_grad_()
        return replace(
            self,
            hidden=self.hidden.clone().requires_grad_(),
            weight=self.weight.clone().requires_grad_(),
            bias=bias,
        )

    def log_distributions(self, form: LogitForm, temperature: float) -> Tensor:
        """Log-probabilities [tokens, vocabulary] from full logits."""
        logits = torch.nn.functional.linear(self.hidden, self.weight, self.bias) * form.scale
        if form.softcap is not None:
            logits = form.softcap * torch.tanh(logits / form.softcap)
        return (logits / temperature).log_softmax(-1)

    def logprobs(self, form: LogitForm, temperature: float) -> Tensor:
        return self.log_distributions(form, temperature).gather(1, self.targets[:, None])[:, 0]


def case(
    *,
    lengths: tuple[int, ...] = (3, 11, 1),
    has_bias: bool = False,
    dtype: torch.dtype = torch.float64,
    spread: float = 1.0,
) -> Case:
    torch.manual_seed(0)
    count = sum(lengths)
    return Case(
        hidden=torch.randn(count, HIDDEN, dtype=dtype) * spread,
        weight=torch.randn(VOCABULARY, HIDDEN, dtype=dtype),
        bias=torch.randn(VOCABULARY, dtype=dtype) if has_bias else None,
        targets=torch.randint(0, VOCABULARY, (count,)),
        lengths=list(lengths),
        weights=torch.rand(count, dtype=dtype) + 0.1,
    )
