"""What an update costs the learner's host beside tensors, which a GPU has on its device.

    time      seconds of one thread: reading the messages, plus one `PolicyUpdate.step` without the
              operations on tensors in it. The least of several repeats, by a clock that costs
              nothing, so other work must rest. What an operation costs Python is the same for long
              and short responses; the microseconds of a token are from the difference of two sizes.
    memory    growth of the resident set in a process of its own. `held`: after the messages were
              read and dropped. `peak`: the largest during one step, over the same start; it also
              holds one micro-batch of the model, which is one trajectory.

    ranks     on 2 and 4 ranks: bytes that rank 0 sends to another one in a step, for a response
              token, and CPU milliseconds of each rank's thread without its tensors.

The model's logits do not depend on its inputs. For time, its vocabulary is 8; for memory it is 260,
as CPython shares the integers below 257. The baseline of `vcpo` is the group's mean.

    python -m benchmarks.learner.learner_host

The last line printed is JSON. `host_us_per_token` is the time of `vcpo` from the first timed size
to the last, `host_bytes_per_token` is `held` at the last size that memory is measured at. Sizes are
written TRAJECTORIESxTOKENS, with the tokens of a response; prompts have 32 more.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.apart import said_apart
from benchmarks.harness.made import run_spec
from benchmarks.harness.measures import parser_of, peak_resident_bytes, resident_bytes
from tests.fixtures.learner.models import llama, seeded_model
from tests.fixtures.learner.ranks import run_ranks
from vcpo.api import VCPORunSpec
from vcpo.wire.packing import ExpertRoutes
from vcpo.wire.trajectory import Trajectory, trajectory_from_message
from vcpo.wire.v1 import work_pb2
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.ranks.commands import Commands, Groups
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.ranks.sharding import place_model
from vcpo_learner.update.policy_update import PolicyUpdate

TIMED_VOCABULARY = 8
MEASURED_VOCABULARY = 260
SHARED_TOKENS = 257
"""Integers that CPython shares, from 0 on."""
PROMPT_TOKENS = 32
GROUP_SIZE = 8
POLICY_VERSION = 2
METHODS = ("vcpo", "grpo")


class ConstantModel(nn.Module):
    """A causal language model whose logits are its only parameter."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def make_messages(num_trajectories: int, num_tokens: int, vocabulary: int) -> list[bytes]:
    """Serialized trajectories, the groups one after another; rewards 0 and 1 take turns."""
    generator = torch.Generator().manual_seed(0)
    return [
        work_pb2.Trajectory(
            trajectory_id=f"{row // GROUP_SIZE}/{row % GROUP_SIZE}",
            prompt_token_ids=_token_bytes(PROMPT_TOKENS, vocabulary, generator),
            response_token_ids=_token_bytes(num_tokens, vocabulary, generator),
            rollout_logprobs=_logprob_bytes(num_tokens, vocabulary, generator),
            version_spans=[
                work_pb2.VersionSpan(policy_version=0, num_tokens=num_tokens // 2),
                work_pb2.VersionSpan(policy_version=1, num_tokens=num_tokens - num_tokens // 2),
            ],
            reward=float(row % 2),
            finish_reason=work_pb2.FINISH_REASON_STOP,
        ).SerializeToString()
        for row in range(num_trajectories)
    ]


def read_groups(messages: Sequence[bytes]) -> list[list[Trajectory]]:
    """Read the trajectories off the wire, as the learner's service does."""
    read = map(work_pb2.Trajectory.FromString, messages)
    flat = [trajectory_from_message(each, path="trajectory") for each in read]
    return [flat[start : start + GROUP_SIZE] for start in range(0, len(flat), GROUP_SIZE)]


class TensorTime(TorchDispatchMode):
    """Adds up the seconds of operations on tensors, while it is entered."""

    clock = staticmethod(time.perf_counter)
    seconds = 0.0
    sent_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        started_s = self.clock()
        result = func(*args, **(kwargs or {}))
        self.seconds += self.clock() - started_s
        if str(func) in ("c10d.broadcast_.default", "c10d.scatter_.default"):  # from rank 0
            self.sent_bytes += sum(each.nbytes for each in args[0])
        return result


def host_seconds(method: str, size: tuple[int, int], repeats: int) -> dict[str, float]:
    """Least seconds of reading, and of a step without its tensors."""
    messages = make_messages(*size, TIMED_VOCABULARY)
    update = PolicyUpdate(
        ConstantModel(TIMED_VOCABULARY), _spec(method, size, GROUP_SIZE), pad_token_id=0
    )
    least = dict.fromkeys(("read", "step"), math.inf)
    for _ in range(repeats):
        started_s = time.perf_counter()
        groups = read_groups(messages)
        read_s = time.perf_counter()
        with TensorTime() as tensors:
            update.step(groups, policy_version=POLICY_VERSION)
        step_s = time.perf_counter() - read_s
        seconds = {"read": read_s - started_s, "step": step_s - tensors.seconds}
        least = {name: min(least[name], seconds[name]) for name in least}
    return least


def rank_figures(ranks: Ranks, groups: Groups, steps: int) -> tuple[float, float]:
    """Bytes from rank 0 in a step of a tiny model, and host milliseconds of one."""
    size = len(groups) * GROUP_SIZE, groups[0][0].num_sampled_tokens
    network, spec = PolicyNetwork(seeded_model(llama)), _spec("vcpo", size, GROUP_SIZE)
    place_model(network, ranks, spec.learner.number_format)
    commands = Commands(ranks)
    update = PolicyUpdate(network, spec, pad_token_id=0, ranks=ranks, commands=commands)
    tensors, started_s = TensorTime(), time.thread_time()
    tensors.clock = time.thread_time  # type: ignore[method-assign]
    with tensors:
        for _ in range(steps if ranks.is_leader else 0):
            update.step(groups, policy_version=POLICY_VERSION)
        (commands.stop if ranks.is_leader else commands.follow)()
    host_s = time.thread_time() - started_s - tensors.seconds
    return tensors.sent_bytes / steps, host_s / steps * 1e3


def memory_bytes(method: str, size: tuple[int, int]) -> dict[str, int]:
    """Growth of this process's resident set by the batch it holds, and by one step on it."""
    model = ConstantModel(MEASURED_VOCABULARY)
    update = PolicyUpdate(model, _spec(method, size, 1), pad_token_id=0)
    warm_up = make_messages(GROUP_SIZE, 8, MEASURED_VOCABULARY)
    update.step(read_groups(warm_up), policy_version=POLICY_VERSION)
    before = resident_bytes()
    # Group by group: messages that still exist would count.
    groups = [
        read_groups(make_messages(GROUP_SIZE, size[1], MEASURED_VOCABULARY))[0]
        for _ in range(size[0] // GROUP_SIZE)
    ]
    held = resident_bytes() - before
    update.step(groups, policy_version=POLICY_VERSION)
    return {"held": held, "peak": peak_resident_bytes() - before}


def parse_size(name: str) -> tuple[int, int]:
    """Trajectories and response tokens of each, by the name of a size."""
    num_trajectories, num_tokens = (int(part) for part in name.split("x"))
    return num_trajectories, num_tokens


def _token_bytes(count: int, vocabulary: int, generator: torch.Generator) -> bytes:
    first = SHARED_TOKENS if vocabulary > SHARED_TOKENS else 0
    ids = torch.randint(first, vocabulary, (count,), generator=generator, dtype=torch.int32)
    return ids.numpy().tobytes()


def _logprob_bytes(count: int, vocabulary: int, generator: torch.Generator) -> bytes:
    noise = 0.01 * torch.randn(count, generator=generator)
    return (noise - math.log(vocabulary)).numpy().tobytes()


def _spec(method: str, size: tuple[int, int], micro_batch: int) -> VCPORunSpec:
    baseline = {"baseline": "groupMean"} if method == "vcpo" else {}
    groups = {"promptsPerStep": size[0] // GROUP_SIZE, "trajectoriesPerPrompt": GROUP_SIZE}
    return run_spec(
        algorithm={"method": method, **baseline},
        batch={**groups, "microBatchTrajectories": micro_batch},
        sampling={"maxNewTokens": size[1]},
    )


def main() -> None:
    """Measure every size, or the memory of one."""
    parser = parser_of(
        __doc__,
        timed=(["64x512", "64x4096"], "sizes"),
        measured=(["64x512", "2048x8192"], "sizes"),
        repeats=(15, "timed steps of each size"),
        routes=(0, "bytes of a token's experts on ranks; 384 are 8 in each of 48 layers"),
    )
    parser.add_argument("--memory-of", choices=METHODS, help="print one method's memory, only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory_of:
        print(json.dumps(memory_bytes(arguments.memory_of, parse_size(arguments.measured[0]))))
        return
    times = times_of(arguments.timed, arguments.repeats)
    memory = {name: bytes_of(name) for name in arguments.measured}
    line = {
        "benchmark": "learner_host",
        "host_us_per_token": times["vcpo"]["host_us_per_token"],
        "host_bytes_per_token": memory[arguments.measured[-1]]["held"],
        "ms": times,
        "bytes_per_token": memory,
        "ranks": {num: figures_of(num, arguments.timed[0], arguments.routes) for num in (2, 4)},
    }
    print(json.dumps(line))


def times_of(names: Sequence[str], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each method at each size, and of a token from the first to the last."""
    sizes = [parse_size(name) for name in names]
    found = {}
    for method in METHODS:
        seconds = [host_seconds(method, size, repeats) for size in sizes]
        totals = [sum(each.values()) for each in seconds]
        tokens = math.prod(sizes[-1]) - math.prod(sizes[0])
        found[method] = {
            f"{name}_{key}_ms": round(value * 1e3, 2)
            for name, each in zip(names, seconds, strict=True)
            for key, value in each.items()
        }
        found[method]["host_us_per_token"] = round((totals[-1] - totals[0]) / tokens * 1e6, 4)
        print(f"{method}: {found[method]}", flush=True)
    return found


def figures_of(num_ranks: int, name: str, route_bytes: int) -> dict[str, Any]:
    """Bytes per token to a rank other than 0, and milliseconds of each, by `rank_figures`."""
    size = parse_size(name)
    groups = read_groups(make_messages(*size, TIMED_VOCABULARY))
    if route_bytes:
        groups = [[_with_routes(one, route_bytes) for one in group] for group in groups]
    found = run_ranks(num_ranks, lambda ranks: rank_figures(ranks, groups, steps=5))
    return {"sent_bytes": found[1][0] / math.prod(size), "ms": [each for _, each in found]}


def _with_routes(one: Trajectory, route_bytes: int) -> Trajectory:
    experts = bytes(route_bytes * one.num_sampled_tokens)
    routes = ExpertRoutes(experts=experts, num_layers=1, num_choices=route_bytes)
    return replace(one, expert_routes=routes)


def bytes_of(name: str) -> dict[str, float]:
    """Bytes of memory per token at one size."""
    num_tokens = math.prod(parse_size(name))
    found = said_apart("benchmarks.learner.learner_host", "--memory-of=vcpo", "--measured", name)
    by_token = {key: round(value / num_tokens, 1) for key, value in found.items()}
    print(f"{name} vcpo: {by_token} (bytes per token)", flush=True)
    return by_token


if __name__ == "__main__":
    main()
