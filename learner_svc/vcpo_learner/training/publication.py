"""Publishes versions of the policy beside the steps, one after another.

```
step n ends   copy n      | step n+1 ............................ | copy n+1   | step n+2
              tensor      | tensor thread                         | waits for n
              thread      | checksums, delta of n -> announced, archived
```

A step waits only while its version is copied. A thread of its own computes what workers need beside
the bytes, and only then the version is announced: who hears of it can fetch it. A delta starts from
the version before, so versions are published in order, and a copy waits for the one before it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from vcpo.metrics.label_values import Stage
from vcpo.spec.workloads import Precision
from vcpo_learner.training.parts import TrainingParts


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

    async def begin(self) -> None:
        """Copy the parameters as the current version, and announce it beside what comes next.

        Raises: the error of the publication before, if it failed.
        """
        update, version = self._parts.update, self._parts.dispatcher.policy_version
        loop = asyncio.get_running_loop()
        with self._parts.stage(Stage.PUBLISH):
            await self.join()
            payload = await loop.run_in_executor(
                self._tensor_thread, lambda: update.policy_payload(self._precision)
            )
        self._announcing = asyncio.create_task(self._announce(version, payload))

    async def join(self) -> None:
        """Wait until the newest version is announced.

        Raises: the error of its publication.
        """
        if self._announcing is not None:
            # Others may wait too: if one of them is cancelled, the publication goes on.
            await asyncio.shield(self._announcing)

    def close(self) -> None:
        """End the thread; there is nothing left to publish."""
        self._thread.shutdown()

    async def _announce(self, version: int, payload: bytes) -> None:
        parts = self._parts
        with parts.traces.publication(version):
            prepared = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: parts.policies.prepare(version, payload)
            )
            parts.policies.publish(prepared)
        if parts.archive_writer is not None:
            parts.archive_writer.offer(prepared)
        parts.dispatcher.notify()
