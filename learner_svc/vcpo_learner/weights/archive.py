"""Writes versions to a folder in any storage that fsspec supports: a volume, an object store.

A full set is large. So the archive writes a full set, the anchor, only at every
`archiveAnchorEverySteps`th version, and deltas between two anchors. It keeps the last two anchors
with their deltas, because a worker may still read the older one, and deletes what is older.

One version is written at a time, in a thread, and training does not wait for it. If several
versions arrive during one write, only the newest of them is written next.
"""

from __future__ import annotations

import asyncio
import logging

import fsspec

from vcpo.spec.workloads import Weights
from vcpo.wire.archive import delta_name, full_set_name, incarnation_folder
from vcpo.wire.v1 import policy_pb2
from vcpo_learner.weights.store import PublishedPolicy

_LOGGER = logging.getLogger(__name__)


class ArchiveFolder:
    """The files of one learner's versions. It is not thread-safe: make one call at a time.

    url: a folder, in fsspec's notation, that nothing else writes to.

    Raises:
        OSError, ValueError, ImportError: from fsspec, if it cannot use the URL.
    """

    def __init__(self, url: str, *, anchor_every: int) -> None:
        self._files, self._root = fsspec.core.url_to_fs(url)
        self._files.makedirs(self._root, exist_ok=True)
        self._anchor_every = anchor_every
        self._kept: list[list[str]] = []
        """File names of each anchor and its deltas, the newest last."""
        self._newest: policy_pb2.ArchivedSet | None = None

    def write(self, policy: PublishedPolicy) -> policy_pb2.ArchivedSet:
        """Write a version; return the files that a worker reads to get it.

        Raises:
            OSError: if the storage refuses it; the next version is then written as an anchor.
        """
        before, self._newest = self._newest, None
        if before is not None and self._continues(before, policy):
            newest = self._write_delta(before, policy)
        else:
            newest = self._write_anchor(policy)
        self._newest = newest
        return newest

    def _continues(self, before: policy_pb2.ArchivedSet, policy: PublishedPolicy) -> bool:
        """Return whether the version's delta starts from `before` and no anchor is due."""
        return (
            policy.delta is not None
            and policy.delta.entry.base_policy_version == before.policy_version
            and policy.manifest.policy_version < before.anchor_policy_version + self._anchor_every
        )

    def _write_delta(
        self, before: policy_pb2.ArchivedSet, policy: PublishedPolicy
    ) -> policy_pb2.ArchivedSet:
        assert policy.delta is not None
        entry = policy.delta.entry
        self._put(delta_name(entry.base_policy_version, entry.policy_version), policy.delta.data)
        return policy_pb2.ArchivedSet(
            policy_version=entry.policy_version,
            anchor_policy_version=before.anchor_policy_version,
            deltas=[*before.deltas, entry],
        )

    def _write_anchor(self, policy: PublishedPolicy) -> policy_pb2.ArchivedSet:
        version = policy.manifest.policy_version
        self._kept.append([])
        self._put(full_set_name(version), policy.payload)
        while len(self._kept) > 2:
            if old := self._kept.pop(0):
                self._files.rm(old)
        return policy_pb2.ArchivedSet(policy_version=version, anchor_policy_version=version)

    def _put(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        self._files.pipe_file(path, data)
        self._kept[-1].append(path)


class ArchiveWriter:
    """Writes the newest version to the archive. Owner: the learner's event loop."""

    def __init__(self, folder: ArchiveFolder) -> None:
        self.archived: policy_pb2.ArchivedSet | None = None
        """The last version that was written; None before the first."""
        self._folder = folder
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
            try:
                self.archived = await asyncio.to_thread(self._folder.write, policy)
            except OSError:
                version = policy.manifest.policy_version
                _LOGGER.exception("cannot write version %d to the archive", version)


def open_archive(settings: Weights, run: str, incarnation: str) -> ArchiveWriter | None:
    """Return the writer of a learner's archive; None if the run has no archive.

    Raises:
        ValueError: naming the field, if the archive cannot be used.
    """
    if settings.archive_url is None:
        return None
    url = incarnation_folder(settings.archive_url, run, incarnation)
    try:
        folder = ArchiveFolder(url, anchor_every=settings.archive_anchor_every_steps)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"spec.weights.archiveUrl: cannot write to '{settings.archive_url}' ({error}); give a"
            " folder that learner and workers mount, or a URL whose fsspec package is installed"
        ) from error
    return ArchiveWriter(folder)
