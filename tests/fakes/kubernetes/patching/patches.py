"""The merge patch. It answers a new document and leaves the old one as it was.

Source: RFC 7386
"""

from __future__ import annotations

import copy
from typing import Any

APPLY = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
PATCH_TYPES = (APPLY, MERGE_PATCH)


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: objects merge, null removes, everything else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged
