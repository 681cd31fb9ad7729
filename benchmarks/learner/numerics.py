"""How far a learner in bfloat16 is from a worker in bfloat16, on one card and on several ranks.

One card holds float32 parameters and computes under autocast, which leaves residuals and
normalizations in float32. Ranks gather parameters in bfloat16 and compute all in it, and so do
workers. The same tokens of text are scored in each way, on a CPU, with transformers as the worker:

    python -m benchmarks.learner.numerics examples/models/smollm2 README.md docs/architecture.md

The last line printed is JSON: for each pair the mean of the absolute difference, nats a token, and
the ESS ratio that its variance leaves of 256 tokens, exp(-256 variance).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan
from vcpo_learner.forward.logprobs import token_logprobs
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.token_batch import batch_tokens

_ROWS: Final = 6
_TOKENS: Final = 256


def as_learner(model: PreTrainedModel, rows: Sequence[Sequence[int]], *, autocast: bool) -> Tensor:
    """Score all tokens but the first of each row, one row at a time, as the learner does."""
    network = PolicyNetwork(model)
    network.compare_head()
    found = []
    for row in rows:
        one = Trajectory(
            trajectory_id="",
            prompt_token_ids=tuple(row[:1]),
            response_token_ids=tuple(row[1:]),
            rollout_logprobs=(-1.0,) * (len(row) - 1),
            version_spans=(VersionSpan(policy_version=0, num_tokens=len(row) - 1),),
            reward=0.0,
            finish_reason=FinishReason.STOP,
        )
        batch = batch_tokens([one], model.device).micro_batch([0], 0, packs=False)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logprobs = token_logprobs(network, batch, temperature=1.0)
        found.append(batch.select_trained(logprobs))
    return torch.cat(found)


@torch.inference_mode()
def as_worker(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Score the same tokens as a worker's engine does: logits in the model's number type."""
    tokens = torch.tensor(rows)
    logits = torch.cat([model(input_ids=row[None]).logits[0, :-1] for row in tokens])
    targets = tokens[:, 1:].flatten()
    return logits.float().log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]


def difference(one: Tensor, other: Tensor) -> dict[str, float]:
    """Return how far two ways of scoring are apart."""
    gaps = (one - other).double()
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

    def loaded(dtype: torch.dtype) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
        return model.eval()

    precise, short = loaded(torch.float32), loaded(torch.bfloat16)
    exact = as_learner(precise, rows, autocast=False)
    card = as_learner(precise, rows, autocast=True)
    precise.get_input_embeddings().register_forward_hook(lambda _, __, found: found.bfloat16())
    ways = {
        "card": card,
        "card_with_short_residuals": as_learner(precise, rows, autocast=True),
        "ranks": as_learner(short, rows, autocast=False),
    }
    worker = as_worker(short, rows)
    line = {
        "benchmark": "numerics",
        **{f"{name}_worker": difference(found, worker) for name, found in ways.items()},
        **{f"{name}_float32": difference(found, exact) for name, found in ways.items()},
        "worker_float32": difference(worker, exact),
        "card_ranks": difference(card, ways["ranks"]),
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
