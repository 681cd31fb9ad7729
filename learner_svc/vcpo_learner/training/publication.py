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

Before a version is announced, the redo log has its step on the disk. So a token's version is one
that a restarted learner comes to again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from vcpo.metrics.label_values import Stage
from vcpo.spec.workloads import Precision
from vcpo.wire.phase import RunPhase
from vcpo.wire.weights import manifest_checksum
from vcpo_learner.changed_elements import ChangedElements
from vcpo_learner.ledger.changes import LogRoom
from vcpo_learner.training.parts import TrainingParts

_POLL_S = 1.0
"""Time between two looks at whether the log can be written."""


class Publication:
    """The version that is being published. Owner: the event loop."""

    def __init__(
        self, parts: TrainingParts, precision: Precision, tensor_thread: ThreadPoolExecutor
    ) -> None:
        self._parts = parts
        self._precision = precision
        self._tensor_thread = tensor_thread
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publication")
        self._announcing: asyncio.Task[None] | None = None
        """Of the newest version, until it is announced."""
        self.known_checksums: Mapping[int, int] = {}
        """Of the versions that an earlier process announced."""
        self.num_different = 0
        """Versions that differ from those that an earlier process announced."""

    async def begin(self) -> None:
        """Take the parameters as the current version, and announce it beside what comes next.

        Raises: the error of the publication before, if it failed.
        """
        update, version = self._parts.update, self._parts.dispatcher.policy_version
        loop = asyncio.get_running_loop()
        with self._parts.stage(Stage.PUBLISH):
            await self.join()
            weights = await loop.run_in_executor(
                self._tensor_thread, lambda: update.take_weights(self._precision)
            )
        self._announcing = asyncio.create_task(self._announce(version, weights))

    async def join(self) -> None:
        """Wait until the newest version is announced.

        Raises: the error of its publication.
        """
        if self._announcing is not None:
            # Others may wait too: if one of them is cancelled, the publication goes on.
            await asyncio.shield(self._announcing)

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
        self, version: int, weights: bytearray | Mapping[str, ChangedElements]
    ) -> None:
        parts = self._parts
        with parts.traces.publication(version):
            prepared = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: parts.policies.prepare(version, weights)
            )
            checksum = manifest_checksum(prepared.manifest)
            self._compare(version, checksum)
            parts.dispatcher.ledger.record_version(version, checksum)
            if not await self._is_committed():
                return
            parts.policies.publish(prepared)
        if parts.archive_writer is not None:
            parts.archive_writer.offer(prepared)
        parts.dispatcher.notify()

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

    def _compare(self, version: int, checksum: int) -> None:
        """Report the first redone version that differs from the one that was announced before."""
        known = self.known_checksums.get(version, checksum)
        if known == checksum:
            return
        self.num_different += 1
        if self.num_different == 1:
            self._parts.event(
                "RedoDiffers",
                f"version {version} has other parameters than before the restart (checksum"
                f" {checksum:016x}, was {known:016x}): this hardware does not repeat its sums bit"
                " for bit; the run goes on with the redone parameters, and tokens sampled by the"
                " earlier ones keep their log-probabilities",
            )
