"""The names under which versions lie in an archive: a folder that a learner writes, workers read.

```
<folder>/<run>/<incarnation>/00000040.full
                             00000040-00000041.delta
                             00000041-00000042.delta
```
"""

from __future__ import annotations


def full_set_name(policy_version: int) -> str:
    """Name of a full set's file."""
    return f"{policy_version:08d}.full"


def delta_name(base_policy_version: int, policy_version: int) -> str:
    """Name of a delta's file."""
    return f"{base_policy_version:08d}-{policy_version:08d}.delta"


def incarnation_folder(url: str, run: str, incarnation: str) -> str:
    """The folder of one learner's versions, as fsspec names it."""
    return f"{url.rstrip('/')}/{run}/{incarnation}"
