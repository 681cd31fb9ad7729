"""What a process of a run says to the harness, beside the product: lines in a file of its own.

A line is written with one `os.write`, so it outlives the process that wrote it. A kill point is a
named place in the product's code; a process that comes to the one it was ordered to dies there.
"""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from time import monotonic, time  # the functions themselves: a fault may put others in their place
from typing import Any, ParamSpec, TypeVar

import xxhash

WITNESS_VARIABLE = "CHAOS_WITNESS"
"""File of this process's lines."""
ORDER_VARIABLE = "CHAOS_ORDER"
"""File that names the kill point at which this process dies; missing: none."""
PAYLOADS_VARIABLE = "CHAOS_PAYLOADS"
"""Folder that gets the weights of every published version."""
ROLL_BACK = "roll-back"
"""Order to a learner, whose guards then ask for a rollback."""
FLIP_WEIGHTS = "flip-weights"
"""File in the run's folder, for which one worker flips a bit of the weights that it has read."""
TRAIN_PREFIX = "train-"
"""Leases of training have ids that begin so; others are evaluations."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Witness:
    """The lines of one process."""

    def __init__(self, path: Path, order: Path) -> None:
        self._order = order
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @classmethod
    def from_environment(cls) -> Witness:
        return cls(Path(os.environ[WITNESS_VARIABLE]), Path(os.environ[ORDER_VARIABLE]))

    def say(self, what: str, **fields: Any) -> None:
        line = {"what": what, "unix_s": time(), "monotonic_s": monotonic(), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def takes(self, order: str) -> bool:
        """Take the harness's order, if it is this one; return whether it was."""
        try:
            is_this = self._order.read_text() == order
            if is_this:
                self._order.unlink()
        except FileNotFoundError:
            return False
        return is_this

    def die_at(self, point: str) -> None:
        """Die as by `kill -9` if the harness ordered it for this place."""
        if self.takes(point):
            os.kill(os.getpid(), signal.SIGKILL)

    def before(
        self, point: str, function: Callable[_Arguments, _Result]
    ) -> Callable[_Arguments, _Result]:
        """The function, with a kill point before it."""

        @wraps(function)
        def watched(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
            self.die_at(point)
            return function(*arguments, **named)

        return watched

    def after(
        self, point: str, function: Callable[_Arguments, _Result]
    ) -> Callable[_Arguments, _Result]:
        """The function, with a kill point after it."""

        @wraps(function)
        def watched(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
            result = function(*arguments, **named)
            self.die_at(point)
            return result

        return watched


def content_digest(
    *,
    prompt: Sequence[int],
    response: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[tuple[int, int]],
    reward: float,
) -> str:
    """Digest of all that a response is trained by, made without the product's own packing.

    spans: policy version and number of tokens of each.
    """
    digest = xxhash.xxh3_64()
    digest.update(struct.pack(f"<{len(prompt)}I", *prompt) + b"|")
    digest.update(struct.pack(f"<{len(response)}I", *response) + b"|")
    digest.update(struct.pack(f"<{len(logprobs)}f", *logprobs) + b"|")
    for version, num_tokens in spans:
        digest.update(struct.pack("<QI", version, num_tokens))
    digest.update(struct.pack("<d", reward))
    return digest.hexdigest()
