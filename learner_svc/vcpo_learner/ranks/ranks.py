"""The ranks: processes that train one model together, and what they share.

```
            shard 0   shard 1        rank = replica x num_shards + shard
replica 0   rank 0    rank 1         a replica holds the parameters once, cut over its shards
replica 1   rank 2    rank 3         replicas hold the same numbers
```

Every rank runs the same update on the same batch, and the model on its own trajectories only. Each
number of a trajectory is computed on one rank and is 0 on all others, so a sum over the ranks
gives it to all of them, exactly and bit by bit. All decisions follow from such numbers, so every
rank takes the same ones.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vcpo.api.learner import Learner
from vcpo.service.lifecycle import StartError
from vcpo.wire.access.tls import is_loopback

_Part = TypeVar("_Part")
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


REPLICATE, SHARD = "replicate", "shard"
"""Names of the mesh's dimensions."""
_LOOPBACK_INTERFACES: Final = ("lo", "lo0")
"""Its names on Linux and on macOS."""
_CHECKPOINT_TIMEOUT: Final = timedelta(hours=1)
"""A rank may write a large shard much slower than another one."""
_LATE: Final = timedelta(minutes=1)
"""How much later than those of the work itself messages give up: a rank that has waited in vain
there can still say so."""
_UNLIMITED: Final = timedelta(days=365)
"""Rank 0 may wait for a batch as long as it likes; its end closes the connection at once."""


class LostRankError(RuntimeError):
    """A rank is gone, hangs, or failed alone; the ranks have to start again from a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Communication:
    """What ranks talk through."""

    mesh: DeviceMesh
    """[num_replicas, num_shards] with dimensions `REPLICATE` and `SHARD`."""
    commands: dist.ProcessGroup
    """All ranks, on the CPU: for the commands of rank 0, which others wait for without limit."""
    control: dist.ProcessGroup
    """All ranks, on the CPU: for messages within a command."""
    checkpoints: dist.ProcessGroup
    """All ranks, on the CPU: for the thread that writes checkpoints beside training."""
    publication: dist.ProcessGroup
    """The ranks of the first replica, on the CPU: for the thread that publishes versions."""
    errors: Store
    """What ranks noted that failed alone, by rank."""
    timeout: timedelta
    """Longest time that a rank waits for the others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """A process's place among the ranks. Owner: the tensor thread."""

    device: torch.device
    rank: int = 0
    size: int = 1
    num_shards: int = 1
    """Ranks of a replica, which hold the parameters once."""
    communication: Communication | None = None
    """Connections between the ranks; None if there is one rank."""
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    """Incarnation of the learner, the same on all ranks: its processes start and end together."""

    @property
    def num_replicas(self) -> int:
        return self.size // self.num_shards

    @property
    def replica(self) -> int:
        return self.rank // self.num_shards

    @property
    def shard(self) -> int:
        return self.rank % self.num_shards

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def share(self, values: Tensor) -> Tensor:
        """Complete numbers, in place, of which each rank has its own and 0 for all others."""
        if self.communication is not None:
            dist.all_reduce(values)
        return values

    def blank(self, values: Tensor) -> None:
        """Set numbers to what they are before each rank writes its own and `share` adds them up.

        With one rank they stay as they are.
        """
        if self.communication is not None:
            values.zero_()

    def share_in_replica(self, values: Tensor) -> Tensor:
        """Complete numbers, in place, among the ranks of the replica; as `share`.

        values: as many on each of these ranks; there may be none.
        """
        if self.communication is not None and len(values):
            dist.all_reduce(values, group=self.communication.mesh[SHARD].get_group())
        return values

    def hand_out(self, parts: Sequence[_Part]) -> _Part:
        """Return this rank's part of what rank 0 has, by a message as long as the largest part.

        parts: [ranks] that pickle; on other ranks than 0 they are not read.
        """
        if self.communication is None:
            return parts[0]
        found: list[Any] = [None]
        others = [None, *parts[1:]] if self.is_leader else None
        dist.scatter_object_list(found, others, group=self.communication.control)
        own: _Part = parts[0] if self.is_leader else found[0]
        return own

    def least(self, value: int) -> int:
        if self.communication is None:
            return value
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.communication.control)
        return int(found)

    def use_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def checkpoint_group(self) -> dist.ProcessGroup | None:
        return None if self.communication is None else self.communication.checkpoints

    def close(self) -> None:
        if self.communication is not None and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(environment: RankEnvironment, learner: Learner, device_type: str) -> Ranks:
    """Wait until all ranks are there, and return this process's place among them.

    device_type: `cuda`, of which a rank takes the GPU of its local number, or `cpu`.

    Raises:
        LostRankError: naming the ranks that did not come in time.
    """
    num_shards = _num_shards(environment.size, learner.fsdp_size)
    device = _own_device(environment, device_type)
    if environment.size == 1:
        return Ranks(device=device)
    return _meet(environment, num_shards, device, timeout_s=learner.collective_timeout_seconds)


def _meet(
    environment: RankEnvironment, num_shards: int, device: torch.device, *, timeout_s: float
) -> Ranks:
    timeout = timedelta(seconds=timeout_s)
    if _is_one_machine(environment):
        _stay_on_loopback()
    store = _store(environment, timeout)
    incarnation = _gather(PrefixStore("meeting", store), environment, timeout)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("groups", store),
        rank=environment.rank,
        world_size=environment.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    mesh = init_device_mesh(
        device.type,
        (environment.size // num_shards, num_shards),
        mesh_dim_names=(REPLICATE, SHARD),
    )
    first_replica = list(range(num_shards))
    communication = Communication(
        mesh=mesh,
        commands=dist.new_group(backend="gloo", timeout=_UNLIMITED),
        control=dist.new_group(backend="gloo", timeout=timeout + _LATE),
        checkpoints=dist.new_group(backend="gloo", timeout=_CHECKPOINT_TIMEOUT),
        publication=dist.new_group(first_replica, backend="gloo", timeout=timeout),
        errors=PrefixStore("errors", store),
        timeout=timeout,
    )
    # A first rank that soon ends would take its store with it while others still connect.
    dist.barrier(group=communication.control)
    return Ranks(
        device=device,
        rank=environment.rank,
        size=environment.size,
        num_shards=num_shards,
        incarnation=incarnation,
        communication=communication,
    )


def _gather(store: Store, environment: RankEnvironment, timeout: timedelta) -> str:
    """Wait until all ranks are there; return the incarnation, which rank 0 names."""
    store.set(f"{environment.rank}", uuid.uuid4().hex[:8])
    keys = [f"{rank}" for rank in range(environment.size)]
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        missing = [key for key in keys if not store.check([key])]
        raise LostRankError(
            f"rank {', '.join(missing)} of {environment.size} did not come within"
            f" {timeout.total_seconds():g} s (learner.collectiveTimeoutSeconds): see its log"
        ) from error
    return store.get("0").decode()


def _store(environment: RankEnvironment, timeout: timedelta) -> TCPStore:
    """Open the store of all ranks, or connect to it."""
    try:
        return TCPStore(
            host_name=environment.address,
            port=environment.port,
            is_master=environment.hosts_store,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=_loopback_listener(environment),
        )
    except (dist.DistError, OSError) as error:
        raise LostRankError(
            f"rank {environment.rank}: the ranks meet at {environment.address}:{environment.port},"
            f" which cannot be {'opened' if environment.hosts_store else 'reached'}"
            f" ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def _is_one_machine(environment: RankEnvironment) -> bool:
    return is_loopback(f"{environment.address}:{environment.port}")


def _loopback_listener(environment: RankEnvironment) -> int | None:
    """Return the socket of a store on the loopback address, which the store then owns.

    By itself a store listens on every interface. None leaves it to that: where the ranks of several
    machines meet, or if another process hosts the store.
    """
    if not (environment.hosts_store and _is_one_machine(environment)):
        return None
    address = environment.address.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, environment.port), family=family).detach()


def _stay_on_loopback() -> None:
    """Let gloo and NCCL connect ranks through the loopback interface, unless the user chose one."""
    for _, name in socket.if_nameindex():
        if name in _LOOPBACK_INTERFACES:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _num_shards(size: int, fsdp_size: int | None) -> int:
    num_shards = fsdp_size or size
    if size % num_shards:
        raise StartError(
            f"spec.learner.fsdpSize: is {num_shards}, must divide the number of ranks ({size})"
        )
    return num_shards


def _own_device(environment: RankEnvironment, device_type: str) -> torch.device:
    if device_type != "cuda":
        return torch.device(device_type)
    count = torch.cuda.device_count()
    if environment.size == 1:
        return torch.device("cuda", torch.cuda.current_device())
    # Whoever starts the ranks may show each of them its own GPU only.
    local = 0 if count == 1 and environment.local_rank > 0 else environment.local_rank
    if local >= count:
        raise StartError(
            f"LOCAL_RANK: is {environment.local_rank}, but the machine shows {count} GPUs; lower"
            " spec.learner.processes, or give each process a GPU"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
