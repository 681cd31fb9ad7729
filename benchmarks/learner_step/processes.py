"""A process for each side, so that sides take turns and each has a memory of its own."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Self

import torch

from benchmarks.harness.group_tokens import Groups
from benchmarks.harness.measures import peak_resident_bytes, resident_bytes
from benchmarks.learner_step.batch import Size, make_groups
from benchmarks.learner_step.sides import Side, step_class, warm_up

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
