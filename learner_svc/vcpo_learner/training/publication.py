"""Publishes versions of the policy beside the steps, one after another.

A step waits only while its parameters are compared with the version before, or copied if too many
differ. A thread of its own makes the delta, patches the published set with it, computes the
checksums and writes the files, and only then the version is announced: who hears of it can read it.

With several ranks each of the first replica publishes its own rows, and rank 0 announces a version
once all have reported that theirs are written. If a rank does not, the ranks have to start again.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from vcpo.api.workloads import Precision
from vcpo.metrics.label_values import Stage
from vcpo.wire.deltas import ChangedElements
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import PayloadMemory
from vcpo_learner.event_loop import TensorThread
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.ranks import LostRankError, Ranks
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.store import PolicyStore

_LOGGER = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Weights = PayloadMemory | Mapping[str, ChangedElements]

_ONE_THREAD = partial(ThreadPoolExecutor, max_workers=1, thread_name_prefix="publication")


@dataclass(slots=True, kw_only=True, eq=False)
class Publication:
    """The version that is being published. Owner: the event loop of rank 0."""

    precision: Precision
    commands: Commands
    published: PublishedState
    tensor_thread: TensorThread
    dispatcher: Dispatcher
    ranks: Ranks
    policies: PolicyStore
    weight_server: WeightServer | None
    """Sends the versions' files; None: all workers see them."""
    gauges: LearnerGauges
    _thread: ThreadPoolExecutor = field(init=False, default_factory=_ONE_THREAD)
    _announcing: asyncio.Task[None] | None = field(init=False, default=None)
    """Announcement of the newest version, until it is made."""

    async def begin(self) -> None:
        """Take the parameters as the current version, and announce it beside what comes next.

        Raises: the error of the publication before, if it failed.
        """
        version = self.dispatcher.policy_version
        with self.gauges.stage(Stage.PUBLISH):
            await self.join()
            weights = await self.tensor_thread.run(partial(self._take_weights, version))
        self._announcing = asyncio.create_task(self._announce(version, weights))

    def _take_weights(self, version: int) -> _Weights:
        take = partial(self.published.take, self.precision)
        return self.commands.call("take_weights", take, self.precision, version)

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
        self._thread.shutdown()

    async def _announce(self, version: int, weights: _Weights) -> None:
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._thread, self.policies.prepare, version, weights)
        if self.weight_server is not None:
            prepared.address = await self.weight_server.address()
        try:
            prepared.other_shards.extend(
                await loop.run_in_executor(self._thread, exchange_shards, self.ranks, version)
            )
        except LostRankError:
            self.commands.is_broken = True
            raise
        self.policies.publish(prepared)
        self.dispatcher.notify()


@dataclass(slots=True, kw_only=True, eq=False)
class ShardPublication:
    """The shard of a rank other than 0, version by version. Owner: the tensor thread.

    It compares the rank's rows whenever rank 0 takes a version, and reports once their files are
    written. Rank 0 takes the next version only after that, so a comparison never meets a patch. The
    ranks of later replicas hold the same rows once more and publish nothing.
    """

    published: PublishedState
    ranks: Ranks
    commands: Commands
    store: PolicyStore
    """Of the rank; the event loop is its owner."""
    weight_server: WeightServer | None
    """Sends the store's files; None: all workers see them."""
    event_loop: asyncio.AbstractEventLoop
    _thread: ThreadPoolExecutor = field(init=False, default_factory=_ONE_THREAD)
    _publishing: Future[None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.commands.on("take_weights", self._take)

    def close(self) -> None:
        self._thread.shutdown()

    def _take(self, precision: Precision, version: int) -> None:
        """Compare the rank's rows, and publish what changed beside what comes next.

        Raises: the error of the version before, if it could not be published.
        """
        if self.ranks.replica > 0:
            return
        if self._publishing is not None:
            self._publishing.result()
        weights = self.published.take(precision)
        self._publishing = self._thread.submit(self._publish, version, weights)

    def _publish(self, version: int, weights: _Weights) -> None:
        try:
            prepared = self.store.prepare(version, weights)
            prepared.shard = self.ranks.shard
            for entry in prepared.tensors:
                entry.first_row = self.published.first_rows[entry.name]
            if self.weight_server is not None:
                address = self.weight_server.address()
                served = asyncio.run_coroutine_threadsafe(address, self.event_loop)
                prepared.address = served.result()
            self.event_loop.call_soon_threadsafe(self.store.publish, prepared)
            exchange_shards(self.ranks, version, prepared)
        except Exception as error:
            _LOGGER.exception("rank %d: cannot publish version %d", self.ranks.rank, version)
            if not isinstance(error, LostRankError):
                exchange_shards(self.ranks, version, error)
            raise


def exchange_shards(
    ranks: Ranks, version: int, own: policy_pb2.PolicyManifest | Exception | None = None
) -> list[policy_pb2.PolicyManifest]:
    """Send this rank's shard of a version to rank 0; return there those of shards 1, 2 and so on.

    All ranks of the first replica call it. own: the manifest of the shard, whose files are written,
    or why there are none; None on rank 0.

    Raises:
        LostRankError: naming the ranks that cannot publish, or that one is gone.
    """
    communication = ranks.communication
    if communication is None or ranks.num_shards == 1:
        return []
    found: list[bytes | str] | None = [b""] * ranks.num_shards if ranks.is_leader else None
    if isinstance(own, Exception):
        sent: bytes | str = f"{type(own).__name__}: {own}"[:500]
    else:
        sent = b"" if own is None else own.SerializeToString()
    try:
        dist.gather_object(sent, found, dst=0, group=communication.publication)
    except RuntimeError as error:
        raise LostRankError(
            f"version {version} is not announced: a rank is gone, or did not report within"
            f" {communication.timeout.total_seconds():g} s (learner.collectiveTimeoutSeconds)"
            f" ({error!s:.200})"
        ) from error
    others = list(enumerate(found or []))[1:]
    failed = [f"rank {rank}: {text}" for rank, text in others if isinstance(text, str)]
    if failed:
        raise LostRankError(
            f"version {version} is not announced, as not every rank can send its part:"
            f" {'; '.join(failed)}"
        )
    return [
        policy_pb2.PolicyManifest.FromString(each) for _, each in others if isinstance(each, bytes)
    ]
