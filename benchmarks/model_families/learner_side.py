"""The learner's numbers of a family: of padded and packed rows, and its exact norms."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.harness.made import run_spec, trajectory
from benchmarks.model_families.tiny_model import FIRST_TOKEN_ID
from vcpo.api import VCPORunSpec
from vcpo.service.rotary_table import fix_rotary_table
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.forward.measurable_norms import require_measurable_norms
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.token_batch import batch_tokens
from vcpo_learner.model.loading import pad_token_id
from vcpo_learner.model.skeleton import load_on_ranks
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.update.micro_batches import MicroBatchRunner

MAX_NEW_TOKENS: Final = 44
_LENGTHS: Final = ((3, 5), (7, 12), (5, 30), (60, 28), (4, MAX_NEW_TOKENS), (2, 9))
"""Tokens of prompts and responses: on both sides of every length that a configuration names, and of
a chunk of the delta rule, 64."""
_CPU: Final = torch.device("cpu")


def make_spec(folder: Path, **sections: Mapping[str, Any]) -> VCPORunSpec:
    """Return a run of the model in a folder."""
    groups = {"promptsPerStep": 1, "trajectoriesPerPrompt": len(_LENGTHS)}
    own = {
        "sampling": {"maxNewTokens": MAX_NEW_TOKENS},
        "model": {"name": str(folder), **sections.pop("model", {})},
        "batch": {**groups, **sections.pop("batch", {})},
    }
    return run_spec(**own, **sections)


def load_learner(spec: VCPORunSpec) -> tuple[PolicyNetwork, int]:
    """Load the policy as the only rank of a learner does, and the token that pads its rows."""
    network, tokenizer = load_on_ranks(spec.model, Ranks(device=_CPU), spec.learner.number_format)
    network.model.train(mode=False)
    return network, pad_token_id(tokenizer)


def random_trajectories() -> list[Trajectory]:
    """Return trajectories of random tokens and different lengths; rewards 1 and 0 take turns."""
    random = Random(0)  # noqa: S311 - tokens, not secrets

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.randrange(FIRST_TOKEN_ID, 101) for _ in range(count))

    return [
        trajectory(
            number, tokens(prompt), tokens(response), (-1.0,) * response, reward=float(number % 2)
        )
        for number, (prompt, response) in enumerate(_LENGTHS)
    ]


def rescored(trajectories: Sequence[Trajectory], logprobs: Sequence[Tensor]) -> list[Trajectory]:
    """Return trajectories as if a policy with these log-probabilities had sampled them."""
    return [
        replace(one, rollout_logprobs=tuple(own.tolist()))
        for one, own in zip(trajectories, logprobs, strict=True)
    ]


@torch.no_grad()
def learner_logprobs(runner: MicroBatchRunner, trajectories: Sequence[Trajectory]) -> list[Tensor]:
    """Return the log-probabilities [tokens] of each response, as an update computes them."""
    tokens = batch_tokens(trajectories, _CPU)
    found: dict[int, Tensor] = {}
    for step in runner.split(tokens, range(len(trajectories))):
        logprobs = runner.logprobs(step.batch)
        for position, row, mask in zip(
            step.positions, logprobs, step.batch.response_mask, strict=True
        ):
            found[position] = row[mask]
    return [found[position] for position in range(len(trajectories))]


def plain_logprobs(model: PreTrainedModel, trajectory: Trajectory) -> Tensor:
    """Return the log-probabilities [tokens] of a response by transformers alone, with a graph."""
    prompt, response = trajectory.prompt_token_ids, trajectory.response_token_ids
    logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits
    predictions = logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1)
    return predictions.gather(1, torch.tensor(response)[:, None])[:, 0]


def mean_difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the mean absolute difference over all numbers of both."""
    pairs = zip(some, others, strict=True)
    return float(torch.cat([(one - other).detach().abs() for one, other in pairs]).mean())


class Reference:
    """Transformers' own numbers of the same trajectories, each alone."""

    def __init__(self, folder: Path, attention: str, trajectories: Sequence[Trajectory]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        )
        # It writes zeros over what it has read of some families: of Youtu, the padding token's row.
        self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        # transformers changes LongRoPE's table where a trajectory crosses the original length; vLLM
        # and a run have one table for the context.
        fix_rotary_table(self.model, None)
        self.trajectories = trajectories
        with torch.no_grad():
            self.logprobs = [plain_logprobs(self.model, each) for each in trajectories]

    def squared_norms(self) -> Tensor:
        """Return ||grad sum_t log pi(y_t)||^2 of each trajectory, by autograd."""
        norms = []
        for one in self.trajectories:
            self.model.zero_grad()
            torch.autograd.backward(plain_logprobs(self.model, one).sum())
            gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
            norms.append(sum(float(each.double().square().sum()) for each in gradients))
        return torch.tensor(norms, dtype=torch.float64)


def rows_difference(folder: Path, layout: str, reference: Reference) -> float:
    """Compare rows of a layout with the reference: mean difference, nats a token.

    Raises:
        StartError: if the learner refuses the layout.
    """
    spec = make_spec(folder, batch={"rowLayout": layout})
    runner = MicroBatchRunner(*_loaded(spec))
    return mean_difference(learner_logprobs(runner, reference.trajectories), reference.logprobs)


def norms_difference(folder: Path, reference: Reference) -> float:
    """Compare exact norms with the reference: the largest relative difference of a square.

    Raises:
        StartError: if the learner refuses to measure them.
    """
    spec = make_spec(folder)
    runner = MicroBatchRunner(*_loaded(spec))
    require_measurable_norms(runner.network, packs=False)
    tokens = batch_tokens(reference.trajectories, _CPU)
    positions = range(len(reference.trajectories))
    (step,) = runner.split(tokens, positions)
    weights = step.batch.response_mask.to(torch.float32)
    squared = runner.forward(step.batch, measures_norms=True).measure(weights).squared_norms
    expected = reference.squared_norms()[list(step.positions)]
    return float(((squared - expected).abs() / expected).max())


def _loaded(spec: VCPORunSpec) -> tuple[PolicyNetwork, VCPORunSpec, int]:
    network, pad = load_learner(spec)
    return network, spec, pad
