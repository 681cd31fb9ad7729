"""Reports of the ranks that publish a version in shards: what each has written, and where.

```
rank 1..n   delta, checksums, files of n --> report --+     first phase
rank 0      delta, checksums, files of n -------------+---> announces n: second phase
```

Reports go through the store, on a connection of their own: collectives belong to the thread that
trains meanwhile. A version of which a report is missing is announced to nobody.
"""

from __future__ import annotations

from typing import Final

from vcpo.wire.v1 import policy_pb2
from vcpo_learner.ranks.ranks import LostRankError, Ranks

_DONE: Final = b"+"
_FAILED: Final = b"-"


class ShardReports:
    """Sends and collects the reports of a version's shards. Owner: the publication's thread."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        communication = ranks.communication
        self._store = None if communication is None else communication.reports
        self.timeout_s = 0.0 if communication is None else communication.timeout.total_seconds()
        """How long rank 0 waits for the reports of a version, in seconds; 0 if there are none."""

    def send(self, manifest: policy_pb2.PolicyManifest) -> None:
        """Say that this rank has written the files of its shard of a version."""
        self._set(manifest.policy_version, _DONE + manifest.SerializeToString())

    def send_failure(self, policy_version: int, error: Exception) -> None:
        """Say that this rank cannot publish its shard of a version."""
        text = f"{type(error).__name__}: {error}"[:500]
        self._set(policy_version, _FAILED + text.encode())

    def have_arrived(self, policy_version: int) -> bool:
        """Return whether every other rank has reported on a version, without waiting."""
        keys = [self._key(policy_version, rank) for rank in self._others]
        return self._store is None or not keys or self._store.check(keys)

    def take(self, policy_version: int) -> list[policy_pb2.PolicyManifest]:
        """Return the manifests of shards 1, 2 and so on of a version; none if there is one shard.

        Raises:
            LostRankError: naming the ranks that did not report, or why they could not publish.
            ForgedMessageError: if somebody else reported in a rank's name.
        """
        failed, manifests = [], []
        for rank in self._others:
            report = self._report(self._key(policy_version, rank))
            if report[:1] == _DONE:
                manifests.append(policy_pb2.PolicyManifest.FromString(report[1:]))
            elif report:
                failed.append(f"rank {rank}: {report[1:].decode()}")
            else:
                failed.append(
                    f"rank {rank} is gone or did not report within {self.timeout_s:g} s"
                    " (learner.collectiveTimeoutSeconds)"
                )
        if failed:
            raise LostRankError(
                f"version {policy_version} is not announced, as not every rank can send its part:"
                f" {'; '.join(failed)}"
            )
        return manifests

    @property
    def _others(self) -> range:
        """The ranks of the first replica but rank 0: shard s of a version is that of rank s."""
        return range(1, self._ranks.num_shards)

    def _key(self, policy_version: int, rank: int) -> str:
        return f"{self._ranks.incarnation}/{policy_version}/{rank}"

    def _set(self, policy_version: int, report: bytes) -> None:
        assert self._store is not None, "one rank reports to nobody"
        self._store.set(self._key(policy_version, self._ranks.rank), report)

    def _report(self, key: str) -> bytes:
        """Remove a report from the store and return it; empty if there is none."""
        if self._store is None or not self._store.check([key]):
            return b""
        report = self._store.get(key)
        self._store.delete_key(key)
        return report
