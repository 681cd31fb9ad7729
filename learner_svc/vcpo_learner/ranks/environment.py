"""The place of a process among the ranks, from the variables that torchrun sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vcpo.service.lifecycle import StartError

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Which rank a process is, and where the ranks meet."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number of the process on its machine, and of its GPU."""
    address: str = "127.0.0.1"
    """Host where the ranks meet: that of rank 0."""
    port: int = 0
    hosts_store: bool = True
    """Whether the process opens the port there; else another one does."""

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> RankEnvironment:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without them one rank."""
        if "WORLD_SIZE" not in variables and "RANK" not in variables:
            return cls()
        size = _integer(variables, "WORLD_SIZE", 1, 1 << 20)
        if size == 1:
            return cls()
        rank = _integer(variables, "RANK", 0, size - 1)
        return cls(
            rank=rank,
            size=size,
            local_rank=_integer(variables, "LOCAL_RANK", 0, rank),
            address=_text(variables, "MASTER_ADDR"),
            port=_integer(variables, "MASTER_PORT", 1, 65_535),
            # The agent of torchrun keeps the port open itself.
            hosts_store=rank == 0 and variables.get(_AGENT_STORE) != "True",
        )


def _text(variables: Mapping[str, str], name: str) -> str:
    if not (value := variables.get(name)):
        raise StartError(
            f"{name}: not set, but other variables of several ranks are; start the learner with"
            " torchrun or 'vcpo run', or remove RANK and WORLD_SIZE"
        )
    return value


def _integer(variables: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = _text(variables, name)
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise StartError(f"{name}: is {text!r}, must be an integer from {low} to {high}")
    return value
