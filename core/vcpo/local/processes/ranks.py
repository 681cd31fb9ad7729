"""The ranks of a local run's learner: processes that train together.

They find each other by the variables that torchrun sets
(https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables). None of them can
continue without the others, so they are started, stopped and restarted as one group.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence

from vcpo.local.processes.child import ChildProcess
from vcpo.service.lifecycle import RANK_LOST

_LOOPBACK = "127.0.0.1"


def rank_name(rank: int) -> str:
    """Return the name of a rank's process, log and ready file: `learner`, `learner-1`, ..."""
    return "learner" if rank == 0 else f"learner-{rank}"


def rank_variables(rank: int, *, num_ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank; none if it is the only one.

    port: where rank 0 waits for the others, on the loopback address.
    """
    if num_ranks == 1:
        return {}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        port: int = listener.getsockname()[1]
    return port


def first_failure(ranks: Sequence[ChildProcess]) -> int | None:
    """Return the rank that failed, of those that have ended; None if none failed.

    One failure ends all ranks within moments. The cause is the rank that hung; else the one that a
    signal killed; else the one that does not say that it lost another.
    """
    failed = [rank for rank, child in enumerate(ranks) if child.exit_code]
    return min(failed, key=lambda rank: (_suspicion(ranks[rank]), rank), default=None)


def _suspicion(child: ChildProcess) -> int:
    """Return how surely an ended process is not the cause: 0 is the cause."""
    assert child.exit_code is not None
    if child.hung_s:
        return 0
    if child.exit_code == -signal.SIGABRT:  # the communication library aborts where a rank is lost
        return 2
    if child.exit_code < 0:
        return 1
    return 3 if child.exit_code == RANK_LOST else 2
