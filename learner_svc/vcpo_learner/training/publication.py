"""Publishes versions of the policy beside the steps, one after another.

```
step n ends   compare n   | step n+1 ............................ | compare n+1 | step n+2
              tensor      | tensor thread                         | waits for n
              thread      | delta, patch, checksums of n -> announced, archived
```

A step waits only while its parameters are compared with the version before, or copied if too many
differ. A thread of its own makes the delta, patches the published set with it and computes the
checksums, and only then the version is announced: who hears of it can fetch it. A delta starts from
the version before, so versions are published in order, and a comparison waits for the patch before.

With several ranks each publishes its own rows (`ShardPublication`), and rank 0 announces a version
once all have reported that they can send theirs. If a rank does not, the version is never
announced: workers go on with the one before it, and the ranks have to start again.

Before a version is announced, the redo log has its step on the disk. So a token's version is one
that a restarted learner comes to again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

from vcpo.api.workloads import Precision
from vcpo.metrics.label_values import Stage
from vcpo.wire.phase import RunPhase
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import manifest_checksum
from vcpo_learner.changed_elements import ChangedElements
from vcpo_learner.ledger.changes import LogRoom, VersionPublished
from vcpo_learner.ranks.ranks import LostRankError
from vcpo_learner.ranks.shard_reports import ShardReports
from vcpo_learner.shared_file import SharedFile
from vcpo_learner.training.parts import TrainingParts
from vcpo_learner.training.tensor_thread import TensorThread, TensorWork
from vcpo_learner.weights.store import PublishedPolicy

_Result = TypeVar("_Result")

_POLL_S = 1.0
"""Time between two looks at whether the log can be written."""
_REPORTS_POLL_S = 0.02
"""Time between two looks at whether the other ranks have reported."""


class Publication:
    """The version that is being published. Owner: the event loop."""

    def __init__(
        self, parts: TrainingParts, precision: Precision, tensor_thread: TensorThread
    ) -> None:
        self._parts = parts
        self._precision = precision
        self._tensor_thread = tensor_thread
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publication")
        self._announcing: asyncio.Task[None] | None = None
        """Of the newest version, until it is announced."""
        self._reports = ShardReports(parts.ranks)
        self.known_versions: Mapping[int, VersionPublished] = {}
        """Those that an earlier process announced."""
        self.num_different = 0
        """Versions that differ from those that an earlier process announced."""

    async def begin(self) -> None:
        """Take the parameters as the current version, and announce it beside what comes next.

        Raises: the error of the publication before, if it failed.
        """
        update, version = self._parts.update, self._parts.dispatcher.policy_version
        with self._parts.stage(Stage.PUBLISH):
            await self.join()
            weights = await self._tensor_thread.run(
                TensorWork.WEIGHTS, lambda: update.take_weights(self._precision, version)
            )
        self._announcing = asyncio.create_task(self._announce(version, weights))

    async def join(self) -> None:
        """Wait until the newest version is announced.

        Raises: the error of its publication.
        """
        if self._announcing is not None:
            # Others may wait too: if one of them is cancelled, the publication goes on.
            await asyncio.shield(self._announcing)

    async def unless_it_fails(self, waiting: Coroutine[None, None, _Result]) -> _Result:
        """Return the result of a wait that may need the newest version.

        Raises: the error of the publication, if it fails meanwhile: nobody would get that version.
        """
        task = asyncio.ensure_future(waiting)
        try:
            if self._announcing is not None:
                await asyncio.wait({task, self._announcing}, return_when=asyncio.FIRST_COMPLETED)
                if self._announcing.done():
                    self._announcing.result()
            return await task
        finally:
            task.cancel()

    async def join_at_end(self, limit_s: float) -> bool:
        """Wait as `join`; give up after `limit_s` seconds in which the log cannot be written.

        Returns whether the newest version was announced.
        """
        started_s = self._parts.clock()
        while self._announcing is not None and not self._announcing.done():
            await asyncio.wait([self._announcing], timeout=_POLL_S)
            is_late = self._parts.clock() - started_s >= limit_s
            if is_late and self._parts.log.room is LogRoom.UNWRITABLE:
                self._announcing.cancel()
                self._announcing = None
                return False
        await self.join()
        return True

    def close(self) -> None:
        """End the thread; there is nothing left to publish."""
        self._thread.shutdown()

    async def _announce(
        self, version: int, weights: SharedFile | Mapping[str, ChangedElements]
    ) -> None:
        parts = self._parts
        with parts.traces.publication(version):
            prepared = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: parts.policies.prepare(version, weights)
            )
            prepared.manifest.other_shards.extend(await self._other_shards(version))
            published = VersionPublished(
                policy_version=version,
                checksum=checksum_of_shards(prepared.manifest),
                num_ranks=parts.ranks.size,
                num_shards=parts.ranks.num_shards,
            )
            self._compare(published)
            parts.dispatcher.ledger.record_version(published)
            if not await self._is_committed():
                return
            await self._publish(prepared)
        if parts.archive_writer is not None:
            parts.archive_writer.offer(prepared)
        parts.dispatcher.notify()

    async def _publish(self, prepared: PublishedPolicy) -> None:
        """Make a version the newest once the server of weights, if there is one, can send it."""
        policies, server = self._parts.policies, self._parts.weight_server
        if server is not None:
            await server.hold(policies.held_files(prepared))
        policies.publish(prepared)
        if server is not None:
            server.tell(policies.held_files())  # without what has just been dropped

    async def _other_shards(self, version: int) -> list[policy_pb2.PolicyManifest]:
        """Wait until the other ranks can send their shards of a version; return the manifests.

        Raises:
            LostRankError: naming the ranks that cannot, or did not say so in time.
        """
        parts, reports, loop = self._parts, self._reports, asyncio.get_running_loop()
        deadline_s = parts.clock() + reports.timeout_s
        while not await loop.run_in_executor(self._thread, reports.have_arrived, version):
            if parts.clock() >= deadline_s:
                break
            # The thread waits for nobody, or it would outlive the learner.
            await parts.sleep(_REPORTS_POLL_S)
        try:
            return await loop.run_in_executor(self._thread, reports.take, version)
        except LostRankError:
            parts.update.give_up()
            raise

    async def _is_committed(self) -> bool:
        """Wait until the log is on the disk; return False if the run stops and it cannot be."""
        log, dispatcher = self._parts.log, self._parts.dispatcher
        commit = asyncio.ensure_future(log.committed())
        while not commit.done():
            await asyncio.wait([commit], timeout=_POLL_S)
            is_stuck = log.room is LogRoom.UNWRITABLE and not commit.done()
            if is_stuck and dispatcher.phase is not RunPhase.RUNNING:
                commit.cancel()
                return False
        await commit
        return True

    def _compare(self, published: VersionPublished) -> None:
        """Report the first redone version that differs from the one that was announced before."""
        known = self.known_versions.get(published.policy_version, published)
        if known == published or not known.is_comparable_with(published):
            return
        self.num_different += 1
        if self.num_different == 1:
            self._parts.event(
                "RedoDiffers",
                f"version {published.policy_version} has other parameters than before the restart"
                f" (checksum {published.checksum:016x}, was {known.checksum:016x}): this hardware"
                " does not repeat its sums bit for bit; the run goes on with the redone"
                " parameters, and tokens sampled by the earlier ones keep their log-probabilities",
            )


def checksum_of_shards(manifest: policy_pb2.PolicyManifest) -> int:
    """Return one checksum of a version: that of its tensors, or xxh3 over those of its shards."""
    if not manifest.other_shards:
        return manifest_checksum(manifest)
    digest = xxhash.xxh3_64()
    for shard in (manifest, *manifest.other_shards):
        digest.update(manifest_checksum(shard).to_bytes(8, "little"))
    return digest.intdigest()
