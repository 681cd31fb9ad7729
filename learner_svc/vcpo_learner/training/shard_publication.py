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

from transformers import PreTrainedModel

from vcpo.api.workloads import Precision
from vcpo_learner.changed_elements import ChangedElements
from vcpo_learner.model.published_state import PublishedState, first_rows
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.ranks.shard_reports import ShardReports
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
        self._reports = ShardReports(ranks)
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
            self._reports.send(prepared.manifest)
        except Exception as error:
            _LOGGER.exception("rank %d: cannot publish version %d", self._ranks.rank, version)
            self._reports.send_failure(version, error)
            raise
