"""File names of policy versions in an archive, a folder that the learner writes and workers read.

```
<folder>/<run>/<incarnation>/00000040.full
                             00000040-00000041.delta
                             00000041-00000042.delta
```
"""

from __future__ import annotations


def full_set_name(policy_version: int) -> str:
    """Return the file name of a full set."""
    return f"{policy_version:08d}.full"


def delta_name(base_policy_version: int, policy_version: int) -> str:
    """Return the file name of a delta."""
    return f"{base_policy_version:08d}-{policy_version:08d}.delta"


def incarnation_folder(url: str, run: str, incarnation: str) -> str:
    """Return the fsspec URL of the folder with the versions of one learner incarnation."""
    return f"{url.rstrip('/')}/{run}/{incarnation}"
