"""The steps that are compared: each takes the whole batch to one AdamW step."""

import importlib
import importlib.util
import multiprocessing
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.harness.made import run_spec
from benchmarks.harness.measures import peak_resident_bytes, resident_bytes
from benchmarks.harness.plain_step import LARGEST_GRADIENT_NORM, LEARNING_RATE, Groups, PlainStep
from benchmarks.harness.random_llama import random_groups, random_model, shorten
from examples.models import smollm2
from vcpo.api import VCPORunSpec
from vcpo.service.lifecycle import keep_freed_memory
from vcpo_learner.update.policy_update import PolicyUpdate

PAD_TOKEN_ID: Final = 0
PRETRAINED_RESPONSE: Final = 12
"""Tokens of its responses."""
FOLDER: Final = Path(smollm2.__file__).parent / smollm2.NAME


class Size(NamedTuple):
    """Of the model and of its batch, which is one group but for a pretrained model."""

    vocabulary: int
    tokens: int
    """Of each trajectory; a quarter is prompt."""
    trajectories: int
    micro_batch: int
    """Trajectories in one forward pass, on every side."""
    hidden: int = 256
    layers: int = 4
    num_groups: int = 1
    folder: Path | None = None
    """Of a pretrained model, which computes in bfloat16; None: random parameters, float32."""
    is_hybrid: bool = False

    @property
    def prompt_tokens(self) -> int:
        return self.tokens // 4 if self.folder is None else self.tokens - PRETRAINED_RESPONSE

    @property
    def num_tokens(self) -> int:
        return self.tokens * self.trajectories * self.num_groups


def _sizes_of(name: str, vocabulary: int) -> dict[str, Size]:
    """About 2048 tokens a micro-batch, or one trajectory where that is longer."""
    shapes = ((256, 8, 8), (1024, 2, 2), (4096, 2, 1))
    return {f"{name}x{shape[0]}": Size(vocabulary, *shape) for shape in shapes}


SIZES: Final = {
    **_sizes_of("32k", 32_768),
    **_sizes_of("128k", 131_072),
    **{f"hybridx{each}": Size(2048, each, 6, 6, is_hybrid=True) for each in (128, 512)},
}
"""By name, VOCABULARYxTOKENS; the hybrid has a vocabulary of 2,048."""

PRETRAINED: Final = Size(49_152, 58, 6, 36, num_groups=6, folder=FOLDER)
"""The batch of `make demo-real`."""

QUICK_SIZES: Final = {
    "64x16": Size(64, 16, 4, 4, hidden=32, layers=1),
    "128x32": Size(128, 32, 2, 1, hidden=32, layers=1),
}
"""For tests: everything runs, and the figures say nothing."""


def make_model(size: Size) -> PreTrainedModel:
    """A model with random parameters, or pretrained, in evaluation mode; the same at every call."""
    if size.folder is not None:
        return LlamaForCausalLM.from_pretrained(size.folder, dtype=torch.float32)
    return random_model(
        size.hidden,
        max_tokens=size.tokens,
        vocabulary=size.vocabulary,
        num_layers=size.layers,
        is_hybrid=size.is_hybrid,
    )


def make_groups(size: Size) -> Groups:
    """Random trajectories of the model of this size; their weights are 1 before the first step."""
    return random_groups(
        make_model(size),
        num_groups=size.num_groups,
        group_size=size.trajectories,
        prompt_tokens=size.prompt_tokens,
        response_tokens=size.tokens - size.prompt_tokens,
    )


WARM_UP_TOKENS = 8


class Side(StrEnum):
    """One of the compared steps."""

    PLAIN = "plain"
    MEAN = "mean"
    OPOB = "opob"
    TRL = "trl"

    @property
    def is_installed(self) -> bool:
        return self is not Side.TRL or importlib.util.find_spec("trl") is not None


_METHODS = {Side.MEAN: "sequenceTis", Side.OPOB: "vcpo"}


class TrainingStep(Protocol):
    """A model, its optimizer, and a way to train on a batch."""

    def take(self, groups: Groups) -> None:
        """Take one optimizer step on the batch."""


def step_class(side: Side) -> Callable[[Size], TrainingStep]:
    """Return what makes a side's step; every side makes the same model."""
    match side:
        case Side.PLAIN:
            return _plain_step
        case Side.TRL:
            importlib.import_module("trl")  # its memory is no side's
            return _trl_step
    return partial(LearnerStep, method=_METHODS[side])


def _plain_step(size: Size) -> TrainingStep:
    return PlainStep(make_model(size), size.micro_batch, uses_bfloat16=size.folder is not None)


def _trl_step(size: Size) -> TrainingStep:
    # TRL is no dependency of the project.
    from benchmarks.harness.trl_step import TrlStep

    return TrlStep(
        make_model(size),
        trajectories=size.trajectories,
        micro_batch=size.micro_batch,
        response_tokens=size.tokens - size.prompt_tokens,
        learning_rate=LEARNING_RATE,
    )


def warm_up(step: TrainingStep, groups: Groups) -> None:
    """Take a step on the first response tokens: it makes the optimizer's state."""
    step.take([[shorten(one, WARM_UP_TOKENS) for one in group] for group in groups])


class LearnerStep:
    """The learner's own update, decisions and diagnostics included."""

    def __init__(self, size: Size, method: str) -> None:
        keep_freed_memory()  # as a learner on a CPU
        self.model = make_model(size)
        self._update = PolicyUpdate(self.model, _spec(size, method), PAD_TOKEN_ID)

    def take(self, groups: Groups) -> None:
        """Take the step; a skipped one would be no measurement."""
        result = self._update.step(groups, policy_version=0)
        if result.skipped is not None:
            raise RuntimeError(f"step skipped: {result.skipped} ({result.skip_detail})")


def _spec(size: Size, method: str) -> VCPORunSpec:
    groups = {"promptsPerStep": size.num_groups, "trajectoriesPerPrompt": size.trajectories}
    return run_spec(
        steps=1,
        algorithm={"method": method},
        batch={**groups, "microBatchTrajectories": size.micro_batch},
        sampling={"maxNewTokens": size.tokens - size.prompt_tokens},
        learner={"precision": "float32" if size.folder is None else "bfloat16"},
        optimizer={"learningRate": LEARNING_RATE, "maxGradientNorm": LARGEST_GRADIENT_NORM},
    )


# A fork has torch imported already, and its peak starts at what it inherits.
_CONTEXT = multiprocessing.get_context("fork")


class SideProcess:
    """A side that takes a step when it is told to. Use as a context manager."""

    def __init__(self, side: Side, size: Size, groups: Groups) -> None:
        self._side = side
        self._connection, other = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(other, side, size, groups))

    def __enter__(self) -> Self:
        self._process.start()
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def step(self) -> float:
        self._connection.send("step")
        return self._answer()

    def peak_bytes(self) -> int:
        self._connection.send("peak")
        return int(self._answer())

    def _answer(self) -> float:
        while not self._connection.poll(1.0):
            if not self._process.is_alive():
                raise RuntimeError(f"the process of {self._side} ended: its error is above")
        answer: float = self._connection.recv()
        return answer


def groups_made_elsewhere(size: Size) -> Groups:
    """`make_groups` in a process of its own, whose memory no side inherits."""
    with _CONTEXT.Pool(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.apply(make_groups, (size,))


def _serve(connection: Connection, side: Side, size: Size, groups: Groups) -> None:
    torch.set_num_threads(1)
    make_step = step_class(side)
    inherited = resident_bytes()
    step = make_step(size)
    warm_up(step, groups)
    connection.send(0.0)
    while True:
        match connection.recv():
            case "step":
                started = time.process_time()
                step.take(groups)
                connection.send(time.process_time() - started)
            case "peak":
                connection.send(float(peak_resident_bytes() - inherited))
