"""Publishes the rows that a rank other than 0 holds: the first phase of a version, on that rank.

```
tensor thread        compares its rows with those published before, as rank 0 does
publication thread   delta, checksums, files --> report to rank 0
```

Rank 0 takes the next version only after all have reported, so a comparison never meets a patch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist
from transformers import PreTrainedModel

from vcpo.api.workloads import Precision
from vcpo.wire.deltas import ChangedElements
from vcpo.wire.v1 import policy_pb2
from vcpo_learner.model.published_state import PublishedState, first_rows
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.ranks import LostRankError, Ranks
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.store import PolicyStore

_LOGGER = logging.getLogger(__name__)


class ShardPublication:
    """The shard of a rank other than 0, version by version. Owner: the tensor thread.

    The ranks of later replicas hold the same rows once more and publish nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        commands: Commands,
        store: PolicyStore,
        weight_server: WeightServer | None,
        *,
        event_loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Publish the rank's rows whenever rank 0 takes a version.

        store: of the rank; the event loop is its owner.
        weight_server: sends the store's files; None: all workers see them.
        """
        self._ranks = ranks
        self._store = store
        self._weight_server = weight_server
        self._event_loop = event_loop
        self._published = PublishedState(model)
        self._first_rows = first_rows(model)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publication")
        self._publishing: Future[None] | None = None
        commands.on("take_weights", self._take)

    def close(self) -> None:
        """End the thread once the version in hand is reported."""
        self._thread.shutdown()

    def _take(self, precision: str, policy_version: int) -> None:
        """Compare the rank's rows, and publish what changed beside what comes next.

        Raises: the error of the version before, if it could not be published.
        """
        if self._ranks.replica > 0:
            return
        if self._publishing is not None:
            self._publishing.result()
        weights = self._published.take(Precision(precision))
        self._publishing = self._thread.submit(self._publish, policy_version, weights)

    def _publish(self, version: int, weights: bytearray | Mapping[str, ChangedElements]) -> None:
        try:
            prepared = self._store.prepare(version, weights)
            prepared.manifest.shard = self._ranks.shard
            for entry in prepared.manifest.tensors:
                entry.first_row = self._first_rows[entry.name]
            if self._weight_server is not None:
                address = self._weight_server.address()
                served = asyncio.run_coroutine_threadsafe(address, self._event_loop)
                prepared.manifest.address = served.result()
            self._event_loop.call_soon_threadsafe(self._store.publish, prepared)
            exchange_shards(self._ranks, version, prepared.manifest)
        except Exception as error:
            _LOGGER.exception("rank %d: cannot publish version %d", self._ranks.rank, version)
            if not isinstance(error, LostRankError):
                exchange_shards(self._ranks, version, error)
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
