"""The policy store: the newest versions of the weights as files, and their manifest.

```
files    n.full   n -> n+1.delta   n+1 -> n+2.delta ... m.full    read only, removed when replaced

/dev/shm/vcpo-weights-<user>-<run>/<incarnation>/<shard>/     by default; of this user alone
<spec.weights.storeUrl>/<run>/<incarnation>/<shard>/          otherwise
```

In memory the full set is one file, which the learner maps and patches in place: each version from
which deltas lead on is a name of it. Who reads it meanwhile finds elements of later versions in it.
Checksums tell him so, and the deltas from the version that he asked for complete what he has read,
since they hold new values (`vcpo.wire.deltas`).

Elsewhere files never change, and when the deltas after the last full set take a quarter of its
room, a version is a full set too.

What a new version replaces is removed only before the next one is written; who has a file open
reads it to its end. Memory has room for one full set; another store also keeps the one before.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import shutil
import stat
import tempfile
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import fsspec
from fsspec.implementations.local import LocalFileSystem

from vcpo.api.workloads import Weights
from vcpo.wire.deltas import ChangedElements, elements_of, encode_delta, write_changes
from vcpo.wire.errors import NotFoundError
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import Payload, PayloadMemory, delta_name, full_set_name, manifest_of
from vcpo_learner.clock import Clock
from vcpo_learner.event_loop import ChangeNotifier

_LOGGER = logging.getLogger(__name__)
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - what is below belongs to this user alone
DELTAS_SHARE = 0.25
"""Largest size of the kept deltas over that of a full set; about 16 versions at RL's learning
rates. A joining worker reads up to so much more than a full set."""
_MAPPED: Final = "mapped"
"""File that no server sends under this name."""
_KEPT_DELTAS = 64
"""Bounds the list of deltas when versions hardly differ; no useful chain is as long."""


class PolicyStore:
    """Writes versions into a folder, and keeps the newest one's manifest.

    Owner: the learner's event loop, but for `prepare` and `full_set_memory`, which may run in
    another thread, one after another.
    """

    def __init__(self, folder: VersionFolder, *, incarnation: str, clock: Clock) -> None:
        self.incarnation = incarnation
        """Incarnation of the learner that numbers these versions."""
        self.newest: policy_pb2.PolicyManifest | None = None
        """The newest version's; None before the first."""
        self._folder = folder
        self._clock = clock
        self.content: PayloadMemory = bytearray()
        """The full set of the version that was prepared last. Only this object writes it."""
        self._deltas: Sequence[policy_pb2.DeltaEntry] = ()
        """The deltas that are kept, in order."""
        self._full_sets: deque[int] = deque()
        """Versions whose full set can be read, the newest last."""
        self._changed = ChangeNotifier()

    def prepare(
        self, policy_version: int, weights: PayloadMemory | Mapping[str, ChangedElements]
    ) -> policy_pb2.PolicyManifest:
        """Write a version's files and return its manifest.

        The caller must publish the version before it prepares the next one.

        weights: a safetensors file, which the store owns from then on, or what differs in the
            newest version's. That one is patched at once.
        """
        self._remove_replaced()
        if not isinstance(weights, Mapping):
            self.content, self._deltas = weights, ()
        else:
            assert self.newest is not None, "changes need a version that they change"
            self._write_delta(self.newest.policy_version, policy_version, encode_delta(weights))
            write_changes(elements_of(self.content), weights)
        manifest = manifest_of(
            self.content, policy_version=policy_version, incarnation=self.incarnation
        )
        bases = [each.base_policy_version for each in self._deltas]
        if self._folder.maps(self.content):
            self._folder.name(full_set_name(policy_version))
            self._full_sets = deque([*bases, policy_version])
        elif not self._full_sets or self._full_sets[-1] not in bases:
            # The deltas take a share of a set at most, which bounds what a joining worker reads.
            if self._folder.is_temporary:  # there is no memory for two
                self._full_sets.clear()
                self._remove_replaced()
            self._folder.write(full_set_name(policy_version), self.content)
            self._full_sets.append(policy_version)
        manifest.deltas.extend(self._deltas)
        manifest.full_set_version = self._full_sets[-1]
        manifest.folder = self._folder.url
        return manifest

    def full_set_memory(self, num_bytes: int) -> PayloadMemory:
        """Return memory for the full set of the next version, which replaces the one before."""
        if not self._folder.is_temporary:
            return self.content if len(self.content) == num_bytes else bytearray(num_bytes)
        self.content = bytearray()  # there is no memory for two
        self._full_sets.clear()
        self._remove_replaced()
        return self._folder.mapped_file(num_bytes)

    def publish(self, manifest: policy_pb2.PolicyManifest) -> None:
        self.newest = manifest
        self._changed.notify()

    async def wait_for_newest(
        self, *, held_incarnation: str, held_version: int | None, wait_s: float
    ) -> policy_pb2.PolicyManifest:
        """Return the newest version; wait up to `wait_s` for one that the caller does not hold."""
        deadline_s = self._clock() + wait_s
        while True:
            newest = self.newest
            held = held_incarnation == self.incarnation and held_version is not None
            is_fresh = newest is not None and not (held and newest.policy_version == held_version)
            remaining_s = deadline_s - self._clock()
            if is_fresh or remaining_s <= 0:
                break
            await self._changed.wait(remaining_s)
        if newest is None:
            raise NotFoundError("policy: no version has been published yet; ask again")
        return newest

    def _write_delta(self, base_policy_version: int, policy_version: int, delta: bytes) -> None:
        entry = policy_pb2.DeltaEntry(
            base_policy_version=base_policy_version,
            policy_version=policy_version,
            total_bytes=len(delta),
        )
        self._folder.write(delta_name(entry), delta)
        self._deltas = useful_deltas([*self._deltas, entry], len(self.content))

    def _remove_replaced(self) -> None:
        while not self._folder.maps(self.content) and (
            len(self._full_sets) > self._folder.kept_full_sets
        ):
            self._full_sets.popleft()
        used = {full_set_name(version) for version in self._full_sets}
        self._folder.keep(used | {delta_name(each) for each in self._deltas})


def useful_deltas(
    deltas: Sequence[policy_pb2.DeltaEntry], full_bytes: int
) -> list[policy_pb2.DeltaEntry]:
    """Return the newest deltas, as many as have room; the newest alone if it is less than a set."""
    deltas = deltas[-_KEPT_DELTAS:]
    kept_bytes = 0
    for number, delta in enumerate(reversed(deltas)):
        kept_bytes += delta.total_bytes
        room_bytes = full_bytes * (DELTAS_SHARE if number else 1)
        if kept_bytes >= room_bytes:
            return list(deltas[len(deltas) - number :])
    return list(deltas)


class VersionFolder:
    """The files of one rank in one incarnation. It is not thread-safe: make one call at a time.

    root: folder of the run, in fsspec's notation, that nothing else writes to.
    is_temporary: whether the files are in this machine's memory, for this run alone.

    Raises:
        OSError, ValueError, ImportError: from fsspec, if it cannot use the URL.
    """

    def __init__(self, root: str, incarnation: str, shard: int, *, is_temporary: bool) -> None:
        self.url = f"{root.rstrip('/')}/{incarnation}/{shard}"
        """The folder of the files."""
        self.is_temporary = is_temporary
        self._files, self._path = fsspec.core.url_to_fs(self.url)
        is_local = isinstance(self._files, LocalFileSystem)
        self.served_root = Path(self._path).parents[1] if is_local else None
        """Folder that the server sends to workers that do not see it; None if it is in a storage
        that all reach."""
        self.kept_full_sets = 1 if is_local else 2
        """Full sets to keep: where an open file can be read to its end, only the newest."""
        self._written: set[str] = set()
        self._mapped: memoryview | None = None
        self._files.makedirs(self._path, exist_ok=True)

    @classmethod
    def open(
        cls, settings: Weights, run: str, run_dir: Path, *, incarnation: str, shard: int
    ) -> Self:
        url = settings.store_url
        try:
            if url is None:
                root = _folder_in_memory(run_dir)
                _remove_others(root, incarnation)
                return cls(str(root), incarnation, shard, is_temporary=True)
            return cls(f"{url.rstrip('/')}/{run}", incarnation, shard, is_temporary=False)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"spec.weights.storeUrl: cannot write to '{url or _memory()}' ({error}); give a"
                " folder that the learner mounts, or a URL whose fsspec package is installed"
            ) from error

    def write(self, name: str, content: Payload) -> None:
        self._written.add(name)
        path = f"{self._path}/{name}"
        try:
            with self._files.open(path, "wb") as file:
                file.write(content)
        except OSError as error:
            raise self._cannot_write(name, len(content), error) from error

    def mapped_file(self, num_bytes: int) -> memoryview:
        """Return the memory of a new file in this machine's memory, which has no name yet.

        It takes the place of the one before, which nothing may refer to any more.
        """
        self._mapped = None
        path = Path(self._path) / _MAPPED
        try:
            path.unlink(missing_ok=True)
            with path.open("xb+") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a write may kill the process
                self._mapped = memoryview(mmap.mmap(file.fileno(), num_bytes))
        except OSError as error:
            raise self._cannot_write(_MAPPED, num_bytes, error) from error
        return self._mapped

    def maps(self, content: PayloadMemory) -> bool:
        return content is self._mapped

    def name(self, name: str) -> None:
        os.link(Path(self._path) / _MAPPED, Path(self._path) / name)
        self._written.add(name)

    def _cannot_write(self, name: str, num_bytes: int, error: OSError) -> OSError:
        return OSError(
            f"spec.weights.storeUrl: cannot write {num_bytes:,} bytes to {self.url}/{name}"
            f" ({error}); make room there, or name another store"
        )

    def keep(self, names: Collection[str]) -> None:
        for name in sorted(self._written.difference(names)):
            self._files.rm_file(f"{self._path}/{name}")
            self._written.discard(name)

    def empty(self) -> None:
        """Remove all files, at the learner's end; in memory the server may have been killed."""
        try:
            if self.is_temporary:
                shutil.rmtree(self._path, ignore_errors=True)
                return
            self.keep(())
        except OSError as error:
            _LOGGER.warning("files of versions stay in %s: %s", self.url, error)


def _memory() -> Path:
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _folder_in_memory(run_dir: Path) -> Path:
    """Return a folder for the run directory, which exists and is this user's alone."""
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
    folder = _memory() / f"vcpo-weights-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ValueError(f"{folder} is another user's")
    folder.chmod(0o700)
    return folder


def _remove_others(root: Path, incarnation: str) -> None:
    for folder in root.iterdir():
        if folder.name != incarnation:
            shutil.rmtree(folder, ignore_errors=True)
