"""What the optimal baseline costs when norms and gradient come from one backward pass.

Three ways to the gradient of one batch, on a Llama with random parameters, each up to a full
`.grad` and without the optimizer's step, which costs all of them the same:

    plain      REINFORCE with the group's mean: one forward and one backward pass per micro-batch
    vcpo       what the learner does: truncated weights, exact norms, optimal baseline
    published  the same estimator as its authors' code has it: one trajectory at a time, its norm
               read off the gradient, two buffers besides (`.grad` times reward, and `.grad`)

CPU seconds are the least of several repeats, the sides taking turns; memory is the growth of the
resident set over an interpreter that has everything imported, in a process for each side. The
numbers of `vcpo` are compared with those of `published`. Nothing is padding or skipped.

    python -m benchmarks.learner.opob_overhead

The last line printed is JSON. Sizes are written HIDDENxSEQUENCE.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

import torch
from transformers import LlamaForCausalLM

from benchmarks.harness.apart import said_apart
from benchmarks.harness.arguments import parser_of
from benchmarks.harness.made import run_spec
from benchmarks.harness.measures import cpu_seconds, peak_resident_bytes
from benchmarks.harness.random_llama import PAD_TOKEN_ID, random_groups, random_llama
from vcpo.algo.baseline import optimal_baseline
from vcpo.api import VCPORunSpec
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.forward.logprobs import token_logprobs, weighted_logprobs
from vcpo_learner.forward.token_batch import TokenBatch, token_batch
from vcpo_learner.update.gradient import GradientAccumulation

WEIGHT_CAP = 8.0
LONG_TOKENS = 128


class Size(NamedTuple):
    """Of the model and of its batch."""

    hidden: int
    sequence: int
    """Tokens of prompt and response together; a quarter is prompt."""
    num_groups: int
    group_size: int
    micro_batch: int
    """Trajectories that go through the model together, except on the published way."""

    @property
    def is_long(self) -> bool:
        return self.sequence > LONG_TOKENS


Groups = Sequence[Sequence[Trajectory]]
Step = Callable[[LlamaForCausalLM, Groups, Size], Sequence[float]]
"""Leaves the gradient in the parameters; returns squared norms, where it measures any."""


def plain_step(model: LlamaForCausalLM, groups: Groups, size: Size) -> Sequence[float]:
    """REINFORCE with the group's mean as baseline."""
    trajectories, advantages = list(chain.from_iterable(groups)), []
    for group in groups:
        mean = fmean(one.reward for one in group)
        advantages += [one.reward - mean for one in group]
    for start in range(0, len(trajectories), size.micro_batch):
        part = slice(start, start + size.micro_batch)
        batch = _token_batch(trajectories[part])
        tokens = token_logprobs(model, batch, temperature=1.0)
        means = tokens.sum(dim=1) / batch.response_mask.sum(dim=1)
        loss = -(means * means.new_tensor(advantages[part])).sum() / len(trajectories)
        loss.backward()  # type: ignore[no-untyped-call]
    return ()


def vcpo_step(model: LlamaForCausalLM, groups: Groups, size: Size) -> Sequence[float]:
    """The learner's own pass: norms and gradient in one."""
    accumulation = GradientAccumulation(model, _spec(size), PAD_TOKEN_ID)
    return accumulation.score(groups, policy_version=0).summary.squared_norms


def published_step(model: LlamaForCausalLM, groups: Groups, size: Size) -> Sequence[float]:
    """One trajectory at a time with two buffers, as the released code goes about it."""
    parameters = list(model.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    score = [torch.zeros_like(parameter) for parameter in parameters]
    norms: list[float] = []
    for group in groups:
        for one in group:
            norms.append(_alone(model, one, num_trajectories=size.num_groups * size.group_size))
            for parameter, summed, scored in zip(parameters, total, score, strict=True):
                assert parameter.grad is not None
                summed.add_(parameter.grad, alpha=-one.reward)
                scored.add_(parameter.grad)
                parameter.grad.zero_()
        baseline = optimal_baseline([one.reward for one in group], norms[-len(group) :])
        for summed, scored in zip(total, score, strict=True):
            summed.add_(scored, alpha=baseline)
            scored.zero_()
    for parameter, summed in zip(parameters, total, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(summed)
    return norms


SIDES: dict[str, Step] = {"plain": plain_step, "vcpo": vcpo_step, "published": published_step}


def _alone(model: LlamaForCausalLM, one: Trajectory, num_trajectories: int) -> float:
    """Forward and backward of one trajectory; the squared norm of its gradient."""
    batch = _token_batch([one])
    tokens = token_logprobs(model, batch, temperature=1.0)
    rollout = torch.tensor(one.rollout_logprobs, dtype=torch.float64)
    log_weight = float((batch.select_trained(tokens.detach()) - rollout).sum())
    weight = min(math.exp(log_weight), WEIGHT_CAP) / len(rollout) / num_trajectories
    weighted_logprobs(tokens, weight * batch.response_mask).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) ** 2


def _token_batch(trajectories: Sequence[Trajectory]) -> TokenBatch:
    return token_batch(trajectories, PAD_TOKEN_ID, torch.device("cpu"))


def _spec(size: Size) -> VCPORunSpec:
    groups = {"promptsPerStep": size.num_groups, "trajectoriesPerPrompt": size.group_size}
    return run_spec(batch={**groups, "microBatchTrajectories": size.micro_batch})


def seconds_by_side(size: Size, repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Least CPU seconds of each side, and by how much `vcpo` is off `published`."""
    model, groups = _model_and_groups(size)
    norms = {
        side: torch.tensor(_run_step(step, model, groups, size)) for side, step in SIDES.items()
    }
    off = ((norms["vcpo"] - norms["published"]).abs() / norms["published"]).max()
    least_s = dict.fromkeys(SIDES, math.inf)
    for _ in range(repeats):
        for side, step in SIDES.items():
            spent_s, _ = cpu_seconds(partial(_run_step, step, model, groups, size))
            least_s[side] = min(least_s[side], spent_s)
    return least_s, {"norm_rel_error": float(off), "gradient_rel_error": _gradient_error(size)}


def _gradient_error(size: Size) -> float:
    """Distance of the gradient of `vcpo` from that of `published`, over the latter's length."""
    model, groups = _model_and_groups(size)
    gradients = []
    for step in (vcpo_step, published_step):
        _run_step(step, model, groups, size)
        rows = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
        gradients.append(torch.cat(rows))
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


def _run_step(step: Step, model: LlamaForCausalLM, groups: Groups, size: Size) -> Sequence[float]:
    model.zero_grad()
    return step(model, groups, size)


def _model_and_groups(size: Size) -> tuple[LlamaForCausalLM, Groups]:
    model = random_llama(size.hidden, max_tokens=size.sequence)
    prompt = size.sequence // 4
    shape = {"num_groups": size.num_groups, "group_size": size.group_size}
    tokens = {"prompt_tokens": prompt, "response_tokens": size.sequence - prompt}
    groups = random_groups(model, **shape, **tokens)
    return model, groups


def peak_bytes(side: str, size: Size) -> int:
    """Growth of this process's largest resident set through two steps of one side."""
    before = peak_resident_bytes()
    model, groups = _model_and_groups(size)
    for _ in range(2):
        _run_step(SIDES[side], model, groups, size)
    return peak_resident_bytes() - before


def measure_size(name: str, peaks: dict[str, int], repeats: int | None) -> dict[str, Any]:
    """Everything about one size."""
    size = parse_size(name)
    least_s, errors = seconds_by_side(size, repeats or (3 if size.is_long else 12))
    return {
        "ratio_vs_plain": round(least_s["vcpo"] / least_s["plain"], 3),
        "ratio_vs_published": round(least_s["vcpo"] / least_s["published"], 3),
        "peak_memory_ratio_vs_plain": round(peaks["vcpo"] / peaks["plain"], 3),
        **errors,
        "seconds": {side: round(value, 4) for side, value in least_s.items()},
        "peak_mib": {side: value >> 20 for side, value in peaks.items()},
    }


def parse_size(name: str) -> Size:
    """A size by its name; long sequences come in a batch of one group."""
    hidden, sequence = (int(part) for part in name.split("x"))
    shape = (1, 8, 8) if sequence > LONG_TOKENS else (8, 8, 32)
    return Size(hidden, sequence, *shape)


def main() -> None:
    """Measure every size, or one side's memory."""
    parser = parser_of(__doc__, sizes=["256x64", "768x512"], threads=(1, "CPU threads"))
    parser.add_argument("--repeats", type=int, help="timed steps of each side (12, or 3 long ones)")
    parser.add_argument("--peak-of", choices=SIDES, help="print one side's memory in bytes, only")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak_of:
        print(peak_bytes(arguments.peak_of, parse_size(arguments.sizes[0])))
        return
    # Memory first: a new process takes over the mark that its parent has left.
    own, threads = "benchmarks.learner.opob_overhead", f"--threads={arguments.threads}"
    peaks = {
        name: {side: said_apart(own, threads, "--peak-of", side, "--sizes", name) for side in SIDES}
        for name in arguments.sizes
    }
    by_size = {}
    for name in arguments.sizes:
        by_size[name] = measure_size(name, peaks[name], arguments.repeats)
        print(f"{name}: seconds {by_size[name]['seconds']}", flush=True)
    print(json.dumps(by_size))


if __name__ == "__main__":
    main()
