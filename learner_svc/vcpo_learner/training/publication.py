"""Publishes versions of the policy beside the steps, one after another.

```
step n ends   compare n   | step n+1 ............................ | compare n+1 | step n+2
              tensor      | tensor thread                         | waits for n
              thread      | delta, checksums, files of n -> announced
```

A step waits only while its parameters are compared with the version before, or copied if too many
differ. A thread of its own makes the delta, patches the published set with it, computes the
checksums and writes the files, and only then the version is announced: who hears of it can read it.
A delta starts from the version before, so versions are published in order, and a comparison waits
for the patch before.

With several ranks each publishes its own rows (`ShardPublication`), and rank 0 announces a version
once all have reported that theirs are written. If a rank does not, the version is never
announced: workers go on with the one before it, and the ranks have to start again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vcpo.api.workloads import Precision
from vcpo.metrics.label_values import Stage
from vcpo.wire.deltas import ChangedElements
from vcpo.wire.v1 import policy_pb2
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.ranks import LostRankError, Ranks
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.training.shard_publication import exchange_shards
from vcpo_learner.training.tensor_thread import TensorThread
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.store import PolicyStore

_Result = TypeVar("_Result")


class Publication:
    """The version that is being published. Owner: the event loop."""

    def __init__(
        self,
        precision: Precision,
        *,
        commands: Commands,
        published: PublishedState,
        tensor_thread: TensorThread,
        dispatcher: Dispatcher,
        ranks: Ranks,
        policies: PolicyStore,
        weight_server: WeightServer | None,
        gauges: LearnerGauges,
        clock: Clock,
    ) -> None:
        """weight_server: sends the versions' files; None: all workers see them."""
        self._precision = precision
        self._commands = commands
        self._published = published
        self._tensor_thread = tensor_thread
        self._dispatcher = dispatcher
        self._ranks = ranks
        self._policies = policies
        self._weight_server = weight_server
        self._gauges = gauges
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publication")
        self._announcing: asyncio.Task[None] | None = None
        """Announcement of the newest version, until it is made."""

    async def begin(self) -> None:
        """Take the parameters as the current version, and announce it beside what comes next.

        Raises: the error of the publication before, if it failed.
        """
        version = self._dispatcher.policy_version
        with self._gauges.stage(Stage.PUBLISH):
            await self.join()
            weights = await self._tensor_thread.run(lambda: self._take_weights(version))
        self._announcing = asyncio.create_task(self._announce(version, weights))

    def _take_weights(self, version: int) -> bytearray | dict[str, ChangedElements]:
        """Return what this rank publishes; each of the others takes and publishes its own rows."""
        return self._commands.call(
            "take_weights",
            lambda: self._published.take(self._precision),
            precision=self._precision,
            policy_version=version,
        )

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

    def close(self) -> None:
        """End the thread; there is nothing left to publish."""
        self._thread.shutdown()

    async def _announce(
        self, version: int, weights: bytearray | Mapping[str, ChangedElements]
    ) -> None:
        prepared = await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self._policies.prepare(version, weights)
        )
        if self._weight_server is not None:
            prepared.manifest.address = await self._weight_server.address()
        prepared.manifest.other_shards.extend(await self._other_shards(version))
        self._policies.publish(prepared)
        self._dispatcher.notify()

    async def _other_shards(self, version: int) -> list[policy_pb2.PolicyManifest]:
        """Wait until the other ranks have written their shards of a version; return the manifests.

        Raises:
            LostRankError: naming the ranks that cannot, or did not say so in time.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, exchange_shards, self._ranks, version)
        except LostRankError:
            self._commands.is_broken = True
            raise
