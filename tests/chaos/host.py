"""`python -m tests.chaos.host`: `vcpo`, whose local run starts its processes with witnesses."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Final

from tests.chaos.wall_clock import CLOCK_VARIABLE
from tests.chaos.witness import ORDER_VARIABLE, PAYLOADS_VARIABLE, WITNESS_VARIABLE
from vcpo.cli.main import app
from vcpo.local.processes.fleet import Fleet

FOLDER_VARIABLE: Final = "CHAOS_HOST"
"""Folder with the witnesses of all processes that any host of the run has started."""
_WATCHED: Final = {"vcpo_learner": "tests.chaos.learner", "vcpo_rollout": "tests.chaos.worker"}


def watch(folder: Path) -> None:
    """Let every process that a host starts have a witness of its own."""
    start = Fleet._start

    @wraps(start)
    def watched(self: Fleet, name: str, module: str, *rest: Any) -> Any:
        variables: Mapping[str, str] = rest[-1]
        life = f"{time.monotonic_ns():020d}-{name}"
        own = {
            WITNESS_VARIABLE: str(folder / "witness" / f"{life}.jsonl"),
            ORDER_VARIABLE: str(folder / "orders" / life),
            PAYLOADS_VARIABLE: str(folder / "payloads"),
            CLOCK_VARIABLE: str(folder / "clocks" / life),
        }
        return start(self, name, _WATCHED[module], *rest[:-1], {**variables, **own})

    Fleet._start = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    watch(Path(os.environ[FOLDER_VARIABLE]))
    app()
