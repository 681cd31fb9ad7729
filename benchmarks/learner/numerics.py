"""How far a learner in bfloat16 is from a worker in bfloat16, and its gradient from float64.

One card holds float32 parameters and computes under autocast, which leaves residuals in float32.
Ranks gather parameters in bfloat16 and compute all in it, and so do workers. A third way is a card
that also rounds the outputs of embeddings and normalizations, and so residuals. The same tokens of
text are scored in each way, on a CPU, with transformers as the worker:

    python -m benchmarks.learner.numerics examples/models/smollm2 README.md docs/architecture.md

The last line printed is JSON. For each pair: the mean of the absolute difference, nats a token, and
the ESS ratio that its variance leaves of 256 tokens, exp(-256 variance). `gradient_rel` is the
distance of a gradient from that in float64, over its length: of the log-probabilities of the first
rows, weighted as rewards above and below a baseline weigh them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.harness.made import trajectory
from vcpo_learner.forward.logprobs import token_logprobs
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.token_batch import batch_tokens

_ROWS: Final = 6
_TOKENS: Final = 256
_GRADIENT_TOKENS: Final = 128
_ADVANTAGES: Final = (1.0, -0.7, 0.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a learner computes."""

    parameters: torch.dtype = torch.float32
    is_autocast: bool = False
    rounds_outputs: bool = False

    def network(self, folder: str) -> PolicyNetwork:
        """Return a model of a folder as this learner has it."""
        model = loaded(folder, self.parameters)
        if self.rounds_outputs:
            round_outputs(model)
        network = PolicyNetwork(model)
        network.compare_head()
        return network

    def logprobs(self, network: PolicyNetwork, row: Sequence[int]) -> Tensor:
        """Score all tokens of a row but the first, as the learner does."""
        one = trajectory("", row[:1], row[1:], (-1.0,) * (len(row) - 1))
        cpu = torch.device("cpu")
        batch = batch_tokens([one], cpu).micro_batch([0], 0, packs=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_autocast):
            logprobs = token_logprobs(network, batch, temperature=1.0)
        return batch.select_trained(logprobs)


WAYS: Final = {
    "card": Way(is_autocast=True),
    "ranks": Way(parameters=torch.bfloat16),
    "card_with_short_residuals": Way(is_autocast=True, rounds_outputs=True),
}
EXACT: Final = Way(parameters=torch.float64)


def round_outputs(model: nn.Module) -> None:
    """Let all modules with parameters but linear layers, which do so anyway, return bfloat16.

    Under autocast only: the output head is compared without.
    """

    def rounded(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output.bfloat16() if torch.is_autocast_enabled("cpu") else output

    for module in model.modules():
        has_own = next(module.parameters(recurse=False), None) is not None
        if has_own and not isinstance(module, nn.Linear):
            module.register_forward_hook(rounded)


def measured(way: Way, folder: str, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of all rows, and the gradient of those of the first ones."""
    network = way.network(folder)
    with torch.no_grad():
        found = torch.cat([way.logprobs(network, row) for row in rows])
    for weight, row in zip(_ADVANTAGES, rows, strict=False):
        torch.autograd.backward(weight * way.logprobs(network, row[:_GRADIENT_TOKENS]).sum())
    grads = (each.grad for each in network.parameters())
    return found, torch.cat([each.float().flatten() for each in grads if each is not None])


def loaded(folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a folder in a number type."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


@torch.inference_mode()
def as_worker(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Score the same tokens as a worker's engine does: logits in the model's number type."""
    tokens = torch.tensor(rows)
    logits = torch.cat([model(input_ids=row[None]).logits[0, :-1] for row in tokens])
    targets = tokens[:, 1:].flatten()
    return logits.float().log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]


def difference(one: Tensor, other: Tensor) -> dict[str, float]:
    """Return how far two ways of scoring are apart."""
    gaps = one.double() - other.double()
    return {
        "nats": round(float(gaps.abs().mean()), 4),
        "ess_of_256": round(math.exp(-256.0 * float(gaps.var())), 3),
    }


def main() -> None:
    """Score and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder of a model in bfloat16")
    parser.add_argument("texts", nargs="+", type=Path)
    arguments = parser.parse_args()
    text = "".join(path.read_text(encoding="utf-8") for path in arguments.texts)
    tokens = AutoTokenizer.from_pretrained(arguments.model)(text).input_ids[: _ROWS * _TOKENS]
    rows = [tokens[at : at + _TOKENS] for at in range(0, len(tokens), _TOKENS)]

    exact, gradient = measured(EXACT, arguments.model, rows)
    worker = as_worker(loaded(arguments.model, torch.bfloat16), rows)
    line: dict[str, object] = {"benchmark": "numerics", "worker_exact": difference(worker, exact)}
    for name, way in WAYS.items():
        found, rounded = measured(way, arguments.model, rows)
        distance = float((rounded - gradient).norm() / gradient.norm())
        line[f"{name}_worker"] = difference(found, worker)
        line[f"{name}_exact"] = difference(found, exact)
        line[f"{name}_gradient_rel"] = round(distance, 4)
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
