"""Reads versions from the archive that `vcpo_learner.weights.archive` writes."""

from __future__ import annotations

import asyncio
import logging

import fsspec

from vcpo.wire.archive import delta_name, full_set_name, incarnation_folder
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError, verify
from vcpo_rollout.weights.deltas import apply_deltas

_LOGGER = logging.getLogger(__name__)


class ArchiveReader:
    """Reads full sets from an archive. It is optional: peers and learner have all that it lacks.

    url: The archive's folder, as an fsspec URL.
    run: Name of the run.
    """

    def __init__(self, url: str, run: str) -> None:
        self._url = url
        self._run = run

    async def full_set(self, manifest: policy_pb2.PolicyManifest) -> tuple[bytearray, int] | None:
        """Return a version's verified payload and the number of bytes read; None on any failure."""
        try:
            return await asyncio.to_thread(self._read, manifest)
        except (OSError, CorruptWeightsError) as error:
            version = manifest.policy_version
            _LOGGER.warning("version %d cannot be read from the archive: %s", version, error)
            return None

    def _read(self, manifest: policy_pb2.PolicyManifest) -> tuple[bytearray, int]:
        archived = manifest.archived
        folder = incarnation_folder(self._url, self._run, manifest.incarnation)
        files, root = fsspec.core.url_to_fs(folder)
        anchor = files.cat_file(f"{root}/{full_set_name(archived.anchor_policy_version)}")
        payload = bytearray(anchor)
        deltas: list[bytes] = [
            files.cat_file(f"{root}/{delta_name(entry.base_policy_version, entry.policy_version)}")
            for entry in archived.deltas
        ]
        num_bytes = len(payload) + sum(map(len, deltas))
        apply_deltas(payload, deltas)
        verify(payload, manifest)
        return payload, num_bytes
