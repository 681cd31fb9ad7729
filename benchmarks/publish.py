"""What it costs to publish a version, on one rank and on two, and to take it in at a worker.

    step path   until the next step may begin: parameters are rounded and compared with the version
                before, from which one value in a hundred differs
    beside      until workers hear of the version: delta, patch of the published set, checksums,
                files
    host bytes  memory that publishing takes, at its highest, files in memory included
    apply       a worker patches the full set in its memory, and verifies every tensor

The model is a Llama with random parameters, published in bfloat16; one CPU thread a rank. Of two
ranks each publishes its own rows, and a worker takes both shards in.

    python -m benchmarks.publish

The last line printed is JSON. Seconds are CPU seconds of all ranks per gigabyte (10^9 bytes) that
they publish, medians over the deltas; host bytes are per byte of what a rank has of the parameters,
in the published number format, and those of the rank that takes most. Each figure is the worse one
of both numbers of ranks. `bit_exact` is true if the worker's bytes, all shards together, are the
learner's rounded parameters.
"""

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness.measures import cpu_seconds, in_digits, parser_of, resident_bytes
from benchmarks.harness.random_llama import random_model
from vcpo.api.learner import Learner as LearnerSection
from vcpo.api.workloads import Precision, Weights
from vcpo.wire.deltas import apply_deltas, elements_of
from vcpo.wire.v1.policy_pb2 import PolicyManifest
from vcpo.wire.weights import delta_name, verify
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.ranks.ranks import RankEnvironment, Ranks, join_ranks
from vcpo_learner.ranks.sharding import local_part, place_model, whole
from vcpo_learner.weights.store import PolicyStore, VersionFolder
from vcpo_rollout.engines.loading_weights import tensors_of

_CHANGED_SHARE = 0.01
_TILE = 1 << 16
_TAKEN = 5
"""Versions that the worker takes in."""
_PER_GB = ("step_path", "beside", "apply")
# A child has torch imported already; its memory counts from where it begins.
_CONTEXT = multiprocessing.get_context("fork")


class HostMemory:
    """The growth of the process's memory to its highest, since it was made (Linux)."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
        self._held_bytes = resident_bytes()

    def peak_bytes(self) -> int:
        return resident_bytes(name="VmHWM") - self._held_bytes


class Learner:
    """A rank that publishes its rows of each version."""

    def __init__(
        self, ranks: Ranks, *, hidden_size: int, num_layers: int, vocabulary: int = 32_000
    ) -> None:
        self._model = random_model(
            hidden_size, max_tokens=64, vocabulary=vocabulary, num_layers=num_layers
        )
        place_model(self._model, ranks, Precision.BFLOAT16)
        self.shard_bytes = 2 * sum(local_part(each).numel() for each in self._model.parameters())
        self.folder = VersionFolder.open(
            Weights(), "run", Path(f"benchmark-{os.getpid()}"), incarnation="i", shard=ranks.shard
        )
        self.store = PolicyStore(self.folder, incarnation="i", clock=time.monotonic)
        self.published = PublishedState(self._model, self.store.full_set_memory)
        self.times_s: list[tuple[float, float]] = []
        """CPU seconds in the step's path and beside it, by version."""

    def publish(self) -> PolicyManifest:
        """Publish the rank's rows as the next version, and return them."""
        step_path_s, weights = cpu_seconds(lambda: self.published.take(Precision.BFLOAT16))
        version = len(self.times_s)
        beside_s, policy = cpu_seconds(lambda: self.store.prepare(version, weights))
        self.store.publish(policy)
        self.times_s.append((step_path_s, beside_s))
        return policy

    def close(self) -> None:
        assert self.folder.served_root is not None
        shutil.rmtree(self.folder.served_root)

    def file_bytes(self) -> int:
        """Return the size of the files that are no memory of this process too."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped = {int(line.split()[4]) for line in maps}
        files = {
            each.stat().st_ino: each.stat().st_size for each in Path(self.folder.url).iterdir()
        }
        return sum(size for number, size in files.items() if number not in mapped)

    @torch.no_grad()
    def change(self) -> None:
        """Move a share of the values by more than their rounding."""
        for parameter in self._model.parameters():
            for tile in local_part(parameter.detach()).view(-1).split(_TILE):
                tile.mul_(1.0 + 0.1 * (torch.rand_like(tile) < _CHANGED_SHARE))

    def rounded(self) -> dict[str, torch.Tensor]:
        """Return all parameters in the published number format; every rank has to call it."""
        return {
            name: whole(parameter.detach()).bfloat16()
            for name, parameter in self._model.named_parameters()
        }


class Worker:
    """A worker's full set of one shard, without the wire."""

    def __init__(self, learner: Learner) -> None:
        self._folder = Path(learner.folder.url)
        self.payload = bytearray(learner.store.content)
        self.delta_bytes = 0
        self.apply_s: list[float] = []

    def take(self, manifest: PolicyManifest) -> None:
        """Patch the set with a version's delta and verify it."""
        delta = (self._folder / delta_name(manifest.deltas[-1])).read_bytes()
        self.delta_bytes = len(delta)
        patch_s, _ = cpu_seconds(lambda: apply_deltas(elements_of(self.payload), [delta]))
        verify_s, _ = cpu_seconds(lambda: verify(self.payload, manifest))
        self.apply_s.append(patch_s + verify_s)


def measure(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Publish versions on this rank, and take its shard of some of them in; return the figures."""
    # The first versions of a process load code; that memory is not the weights'.
    tiny = Learner(ranks, hidden_size=32, num_layers=1, vocabulary=100)
    for _ in range(2):
        tiny.publish()
        tiny.change()
    tiny.close()
    learner = Learner(ranks, hidden_size=options.hidden_size, num_layers=options.layers)
    memory = HostMemory()
    host_bytes = 0
    for _ in range(options.versions):
        learner.publish()
        learner.change()
        host_bytes = max(host_bytes, memory.peak_bytes() + learner.file_bytes())
    worker = Worker(learner)
    for _ in range(_TAKEN):
        newest, rounded = learner.publish(), learner.rounded()
        learner.change()
        worker.take(newest)
    learner.close()
    held, begins = tensors_of(worker.payload), learner.published.first_rows
    rows = {name: (begins[name], len(each)) for name, each in held.items()}
    return {
        "gigabytes": len(worker.payload) / 1e9,
        "step_path_s": median(one for one, _ in learner.times_s[1:]),
        "beside_s": median(one for _, one in learner.times_s[1:]),
        "apply_s": median(worker.apply_s),
        "delta_bytes": worker.delta_bytes,
        "host_bytes_per_shard_byte": host_bytes / learner.shard_bytes,
        "is_equal": all(
            torch.equal(
                held[name].view(torch.int16), rounded[name][begin : begin + count].view(torch.int16)
            )
            for name, (begin, count) in rows.items()
        ),
        "rows": rows,
        "all_rows": {name: len(each) for name, each in rounded.items()},
    }


def figures_of(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all ranks together.

    shards: what `measure` returned, by rank.
    """
    gigabytes = sum(each["gigabytes"] for each in shards)
    # Rows that begin where the last ones end, up to the end of the tensor, are each of them once.
    ends: dict[str, int] = dict.fromkeys(shards[0]["all_rows"], 0)
    is_exact = all(each["is_equal"] for each in shards)
    for shard in shards:
        for name, (begin, count) in shard["rows"].items():
            is_exact &= begin == ends[name]
            ends[name] = begin + count
    per_gb = {
        f"{name}_cpu_s_per_gb": sum(each[f"{name}_s"] for each in shards) / gigabytes
        for name in _PER_GB
    }
    return {
        "gigabytes": gigabytes,
        **per_gb,
        "host_bytes_per_shard_byte": max(each["host_bytes_per_shard_byte"] for each in shards),
        "delta_share": sum(each["delta_bytes"] for each in shards) / 1e9 / gigabytes,
        "bit_exact": is_exact and ends == shards[0]["all_rows"],
    }


def on_ranks(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of `size` ranks, each a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
    given = [(rank, size, port, options, sending) for rank, (_, sending) in enumerate(pipes)]
    ranks = [_CONTEXT.Process(target=_run, args=each) for each in given]
    gc.freeze()  # else the children's collectors copy the pages of what this process has imported
    for rank in ranks:
        rank.start()
    gc.unfreeze()
    for _, sending in pipes:
        sending.close()
    figures = figures_of([receiving.recv() for receiving, _ in pipes])
    for rank in ranks:
        rank.join()
    return figures


def _run(rank: int, size: int, port: int, options: argparse.Namespace, sending: Connection) -> None:
    torch.set_num_threads(1)
    environment = RankEnvironment(rank=rank, size=size, port=port, hosts_store=rank == 0)
    ranks = join_ranks(environment, LearnerSection(), "cpu")
    sending.send(measure(ranks, options))
    ranks.close()


def main() -> None:
    """Print the figures by number of ranks, and JSON at the end."""
    options = parser_of(
        __doc__,
        hidden_size=(1024, "width of the model"),
        layers=6,
        versions=(20, "published before a worker joins"),
        ranks=[1, 2],
    ).parse_args()
    by_ranks = {}
    for size in options.ranks:
        by_ranks[str(size)] = in_digits(on_ranks(size, options))
        print(json.dumps({"ranks": size, **by_ranks[str(size)]}), flush=True)
    worse = [*(f"{name}_cpu_s_per_gb" for name in _PER_GB), "host_bytes_per_shard_byte"]
    worst = {name: max(each[name] for each in by_ranks.values()) for name in sorted(worse)}
    is_exact = all(each["bit_exact"] for each in by_ranks.values())
    print(json.dumps({**worst, "bit_exact": is_exact, "by_ranks": by_ranks}))


if __name__ == "__main__":
    main()
