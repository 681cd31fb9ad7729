"""How often a step would wait for a GPU, and how much a host does in it; counted without a GPU.

A step of the learner in bfloat16, with activation checkpoints: 8 trajectories of one group in one
micro-step, on a Qwen2 of 28 layers with next to no numbers in them. The branches that a GPU takes
are taken on the CPU. Counted are

    syncs      what a GPU would have to be waited for: a number read from it, a list copied to it
               from memory that is not page-locked, an operation whose result has a size that it
               decides
    launches   operations that compute something; each is at least one kernel
    host CPU   seconds of this process, the least of several steps, of which the sides take turns

in the step with exact norms (`opob`), and with the group's mean as baseline (`mean`).

    python -m benchmarks.learner.host_syncs

The last line printed is JSON. Aims: `syncs_per_micro_step` (of `opob`) at most 60,
`launch_ratio_vs_mean` at most 1.1, `host_cpu_ratio_vs_mean` at most 1.25.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.random_models import PAD_TOKEN_ID, ModelSize, make_model
from benchmarks.harness.made import run_spec
from benchmarks.harness.measures import parser_of
from benchmarks.harness.random_llama import random_groups
from vcpo.api import VCPORunSpec
from vcpo_learner.forward import policy_network
from vcpo_learner.output_head import logit_tiles, trajectory_gradients
from vcpo_learner.output_head.logit_tiles import TiledLogits
from vcpo_learner.per_sample_gradients import factors, measurement, taps
from vcpo_learner.update.policy_update import PolicyUpdate

_READS: Final = ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
"""Methods of a tensor that read its numbers."""
_SIZED_BY_NUMBERS: Final = ("nonzero", "unique", "masked_select", "bincount")
_NO_KERNELS: Final = (
    *("view", "expand", "detach", "transpose", "slice", "select.int", "permute", "unsqueeze"),
    *("squeeze", "aten.t.default", "split", "alias", "as_strided", "size", "is_same", "empty"),
    *("_local_scalar", "promote_types", "unbind", "lift_fresh", "prim."),
)
"""Parts of the names of operations that compute nothing."""
_METHODS: Final = {"opob": "vcpo2", "mean": "sequenceTis"}
"""By side."""


class Count(TorchDispatchMode):
    """Counts syncs, by place, and launches, while it is entered; a fused function is one."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.num_bytes = 0
        """Read and written by all kernels but products."""
        self._stack = ExitStack()
        self._is_fused = False

    def __enter__(self) -> Count:
        counted = [(Tensor, name, {}) for name in (*_READS, "new_tensor")]
        counted += [(Tensor, name, {"only_lists": True}) for name in ("__getitem__", "__setitem__")]
        for owner, name, only in (*counted, (torch, "tensor", {"only_to_device": True})):
            self._stack.enter_context(self._counting(owner, name, **only))
        for owner in (taps, logit_tiles):
            self._stack.enter_context(patch.object(owner, "run", self._run))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, found = str(func), func(*args, **(kwargs or {}))
        if not (self._is_fused or any(part in name for part in _NO_KERNELS)):
            self._launch(name, args, kwargs, found)
        if any(part in name for part in _SIZED_BY_NUMBERS) or _has_mask(name, args):
            self._count(name)
        if name == "aten.repeat_interleave.Tensor" and not (kwargs or {}).get("output_size"):
            self._count(name)
        return found

    def _run(self, function: Any, *arguments: Any) -> Any:
        self._is_fused = True
        found = function(*arguments)
        self._is_fused = False
        self._launch(function.__name__, arguments, found)
        return found

    def _launch(self, name: str, *values: Any) -> None:
        self.kernels[name] += 1
        tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
        for each in () if "mm." in name or name.startswith("host_syncs") else tensors:
            # What is broadcast is in memory once.
            sizes = (size for at, size in enumerate(each.shape) if each.stride(at))
            self.num_bytes += torch.Size(sizes).numel() * each.element_size()

    def _counting(
        self, owner: Any, name: str, *, only_lists: bool = False, only_to_device: bool = False
    ) -> Any:
        original = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            is_left_out = only_lists and not _has_list(arguments[1])
            if not is_left_out and (not only_to_device or options.get("device") is not None):
                self._count(name)
            return original(*arguments, **options)

        return patch.object(owner, name, counted)

    def _count(self, what: str) -> None:
        place = _place()
        if "torch/optim" not in place:
            self.syncs[f"{place} {what}"] += 1


def _has_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) for part in parts)


def _has_mask(name: str, args: tuple[Any, ...]) -> bool:
    if not name.startswith(("aten.index.Tensor", "aten.index_put")):
        return False
    return any(each is not None and each.dtype is torch.bool for each in args[1])


def _place() -> str:
    """The line of the learner, or else of a library, that asks."""
    frames = [frame for frame in traceback.extract_stack() if "/torch/utils/" not in frame.filename]
    for part in ("vcpo_learner/", "site-packages/"):
        for frame in reversed(frames):
            if part in frame.filename:
                return f"{frame.filename.partition(part)[2]}:{frame.lineno}"
    return "?"


def wide_product(first: Tensor, second: Tensor) -> Tensor:
    """Multiply matrices with sums in float32."""
    return first.float() @ second.float()


def add_wide_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add a product of matrices to a sum in float32."""
    total.addmm_(first.float(), second.float())


# One kernel each, as on a GPU; with an overhead of its own.
product_kernel = torch.library.custom_op(
    "host_syncs::product",
    wide_product,
    mutates_args=(),
    schema="(Tensor first, Tensor second) -> Tensor",
)
add_product_kernel = torch.library.custom_op(
    "host_syncs::add_product",
    add_wide_product,
    mutates_args=("total",),
    schema="(Tensor(a!) total, Tensor first, Tensor second) -> ()",
)


@contextmanager
def gpu_branches(*, counted: bool = True) -> Iterator[None]:
    """Take the branches of a GPU: its factors, sizes and decisions.

    counted: whether products with wide sums are one kernel each.
    """
    gpu = "cuda"
    product = product_kernel if counted else wide_product
    add_product = add_product_kernel if counted else add_wide_product
    changes: list[tuple[Any, str, Any]] = [
        (factors, "token_products", lambda first, second: product(first, second.mT)),
        (factors, "product", product),
        (factors, "_add_product", add_product),
        (TiledLogits, "factors", lambda self, values: values.to(self.input_dtype)),
        (TiledLogits, "product", lambda _, left, right, out=None: product(left, right)),
        (TiledLogits, "add_product", lambda _, *factors: add_product(*factors)),
    ]
    tables: list[dict[str, Any]] = [
        measurement._CHUNK_ELEMENTS,
        measurement._FLOPS_PER_TOUCH,
        trajectory_gradients._FLOPS_PER_TOUCH,
        logit_tiles._TILE_SIZES,
    ]
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        for table in tables:
            stack.enter_context(patch.dict(table, {"cpu": table[gpu]}))
        stack.enter_context(patch.dict(policy_network.SMALL_LOGITS, {"cpu": 0}))
        yield


class Side:
    """Takes steps of one side, one after another."""

    def __init__(self, side: str, *, num_layers: int, response_tokens: int) -> None:
        size = ModelSize(8, num_layers, 16, heads=2, key_value_heads=1, vocabulary=64)
        model = make_model(size, torch.device("cpu"))
        self._side = side
        self._update = PolicyUpdate(model, _spec(_METHODS[side]), PAD_TOKEN_ID)
        tokens = {"prompt_tokens": 1, "response_tokens": response_tokens}
        self._groups = random_groups(model, num_groups=1, group_size=8, **tokens)
        self.step()

    def step(self) -> None:
        self._update.step(self._groups, policy_version=0)

    def host_cpu_s(self) -> float:
        """Take a step; return seconds of this process."""
        with gpu_branches(counted=False):
            start_s = time.process_time()
            self.step()
            return time.process_time() - start_s

    def count(self) -> dict[str, int]:
        """Take a step; return what it does, and print what it does most."""
        with gpu_branches(), Count() as count:
            self.step()
        for name, times in count.kernels.most_common(12):
            sys.stdout.write(f"{self._side}: {times:5d} {name}\n")
        for place, times in count.syncs.most_common(8):
            sys.stdout.write(f"{self._side}: {times:4d} {place}\n")
        return {"syncs": count.syncs.total(), "launches": count.kernels.total()}


def _spec(method: str) -> VCPORunSpec:
    return run_spec(
        learner={"precision": "bfloat16", "activationCheckpointing": "layers"},
        sampling={"maxNewTokens": 512},
        algorithm={"method": method},
        batch={"promptsPerStep": 1, "trajectoriesPerPrompt": 8},
        steps=100,
    )


def main() -> None:
    """Count every side and print."""
    arguments = parser_of(
        __doc__, layers=28, tokens=(2, "of a response"), repeats=(5, "steps that are timed")
    ).parse_args()
    torch.set_num_threads(1)
    with gpu_branches():
        sides = {
            name: Side(name, num_layers=arguments.layers, response_tokens=arguments.tokens)
            for name in _METHODS
        }
    found: dict[str, dict[str, float]] = {name: {**side.count()} for name, side in sides.items()}
    turns = [
        {name: side.host_cpu_s() for name, side in sides.items()} for _ in range(arguments.repeats)
    ]
    for name, numbers in found.items():
        numbers["host_cpu_s"] = round(min(turn[name] for turn in turns), 3)
    opob, mean = found["opob"], found["mean"]
    line = {
        "benchmark": "host_syncs",
        "syncs_per_micro_step": opob["syncs"],
        "launch_ratio_vs_mean": round(opob["launches"] / mean["launches"], 3),
        "host_cpu_ratio_vs_mean": round(opob["host_cpu_s"] / mean["host_cpu_s"], 3),
        "sides": found,
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
