"""Writes versions to a folder in any storage that fsspec supports: a volume, an object store.

A full set is large. So the archive writes a full set, the anchor, only at every
`archiveAnchorEverySteps`th version, and deltas between two anchors. It keeps the last two anchors
with their deltas, because a worker may still read the older one, and deletes what is older.

One version is written at a time, in a thread, and training does not wait for it. If several
versions arrive during one write, their deltas are written next, or the newest of them if there are
none. A full set may be patched while it is written (`published_set`): then it becomes usable with
the deltas to the version of the patch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from vcpo.api.workloads import Weights
from vcpo.service.private_files import share, shared_files
from vcpo.wire.archive import delta_name, full_set_name, incarnation_folder
from vcpo.wire.limits import CHUNK_BYTES
from vcpo.wire.v1 import policy_pb2
from vcpo_learner.weights.store import PolicyStore, PublishedDelta, PublishedPolicy

_LOGGER = logging.getLogger(__name__)


class ArchiveFolder:
    """The files of one learner's versions. It is not thread-safe: make one call at a time.

    url: a folder, in fsspec's notation, that nothing else writes to.

    Raises:
        OSError, ValueError, ImportError: from fsspec, if it cannot use the URL.
    """

    def __init__(self, url: str, *, anchor_every: int) -> None:
        self._files, self._root = fsspec.core.url_to_fs(url)
        with shared_files():  # before the first step, when nobody else writes
            self._files.makedirs(self._root, exist_ok=True)
        self._anchor_every = anchor_every
        self._kept: list[list[str]] = []
        """File names of each anchor and its deltas, the newest last."""
        self._newest: policy_pb2.ArchivedSet | None = None
        self._needed_version = 0
        """Newest version of which the anchor may hold elements."""

    @property
    def newest_version(self) -> int | None:
        """The version that was written last; None if the next one has to be an anchor."""
        return None if self._newest is None else self._newest.policy_version

    def write(
        self, policy: PublishedPolicy, deltas: Sequence[PublishedDelta]
    ) -> policy_pb2.ArchivedSet | None:
        """Write a version; return the files that a worker reads to get it.

        Returns None if later deltas have to be written before the files are of use.

        deltas: those that lead from `newest_version` to the version; none if there is no chain.

        Raises:
            OSError: if the storage refuses it; the next version is then written as an anchor.
        """
        before, self._newest = self._newest, None
        if before is None or not deltas or self._is_anchor_due(before, policy):
            newest = self._write_anchor(policy)
        else:
            newest = self._write_deltas(before, deltas)
        self._newest = newest
        return newest if self._is_usable(newest) else None

    def _is_anchor_due(self, before: policy_pb2.ArchivedSet, policy: PublishedPolicy) -> bool:
        due_version = before.anchor_policy_version + self._anchor_every
        # An anchor that waits for its deltas gets them first: another one might have to wait too.
        return policy.policy_version >= due_version and self._is_usable(before)

    def _is_usable(self, archived: policy_pb2.ArchivedSet) -> bool:
        return archived.policy_version >= self._needed_version

    def _write_deltas(
        self, before: policy_pb2.ArchivedSet, deltas: Sequence[PublishedDelta]
    ) -> policy_pb2.ArchivedSet:
        for delta in deltas:
            entry = delta.entry
            self._put(
                delta_name(entry.base_policy_version, entry.policy_version),
                bytes(delta.file.content),
            )
        return policy_pb2.ArchivedSet(
            policy_version=deltas[-1].entry.policy_version,
            anchor_policy_version=before.anchor_policy_version,
            deltas=[*before.deltas, *(delta.entry for delta in deltas)],
        )

    def _write_anchor(self, policy: PublishedPolicy) -> policy_pb2.ArchivedSet:
        version, full_set = policy.policy_version, policy.full_set.file
        self._kept.append([])
        path = self._path(full_set_name(version))
        with self._files.open(path, "wb") as file:
            for offset in range(0, full_set.size_bytes, CHUNK_BYTES):
                data, self._needed_version = full_set.read(offset, CHUNK_BYTES)
                file.write(data)
        self._share(path)
        self._kept[-1].append(path)
        while len(self._kept) > 2:
            if old := self._kept.pop(0):
                self._files.rm(old)
        return policy_pb2.ArchivedSet(policy_version=version, anchor_policy_version=version)

    def _put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        self._files.pipe_file(path, data)
        self._share(path)
        self._kept[-1].append(path)

    def _share(self, path: str) -> None:
        """Let the workers read a file of a volume, whose user may be another one."""
        if isinstance(self._files, LocalFileSystem):
            share(Path(path))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class ArchiveWriter:
    """Writes the newest version to the archive. Owner: the learner's event loop."""

    def __init__(self, folder: ArchiveFolder, store: PolicyStore) -> None:
        """Write to a folder; the store has the deltas of versions that arrive during a write."""
        self.archived: policy_pb2.ArchivedSet | None = None
        """The last version that can be read; None before the first."""
        self._folder = folder
        self._store = store
        self._waiting: PublishedPolicy | None = None
        self._writing: asyncio.Task[None] | None = None

    def offer(self, policy: PublishedPolicy) -> asyncio.Task[None]:
        """Write a version after the current write, unless a newer one is offered before.

        Returns the task that writes until every offered version is written or replaced.
        """
        self._waiting = policy
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return self._writing

    async def _write(self) -> None:
        while (policy := self._waiting) is not None:
            self._waiting = None
            deltas = self._deltas_to(policy)
            try:
                archived = await asyncio.to_thread(self._folder.write, policy, deltas)
            except OSError:
                version = policy.policy_version
                _LOGGER.exception("cannot write version %d to the archive", version)
            else:
                self.archived = archived or self.archived

    def _deltas_to(self, policy: PublishedPolicy) -> list[PublishedDelta]:
        """Return the deltas from the version that was written last; none if there is no chain."""
        written = self._folder.newest_version
        if written is None:
            return []
        deltas = self._store.deltas_from(self._store.incarnation, written)
        return [each for each in deltas if each.entry.policy_version <= policy.policy_version]


def open_archive(settings: Weights, run: str, store: PolicyStore) -> ArchiveWriter | None:
    """Return the writer of a learner's archive; None if the run has no archive.

    Raises:
        ValueError: naming the field, if the archive cannot be used.
    """
    if settings.archive_url is None:
        return None
    url = incarnation_folder(settings.archive_url, run, store.incarnation)
    try:
        folder = ArchiveFolder(url, anchor_every=settings.archive_anchor_every_steps)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"spec.weights.archiveUrl: cannot write to '{settings.archive_url}' ({error}); give a"
            " folder that learner and workers mount, or a URL whose fsspec package is installed"
        ) from error
    return ArchiveWriter(folder, store)
