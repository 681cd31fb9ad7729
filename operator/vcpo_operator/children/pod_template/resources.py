"""Default resources of learners and workers, for a user's template that sets none.

- Requests let the scheduler and quotas count the pod. They are small: a learner and two workers
  start on a machine with two cores. Users who train a real model set their own.
- A memory limit keeps a process that leaks memory from ending its neighbors. A pod that reaches the
  limit reports `OOMKilled`.
- No CPU limit: throttling a process in the middle of a step helps nobody, and requests share a busy
  node fairly.
- No GPU: most nodes have none.
- No memory limit beside a GPU: only the user knows the size of such a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_DEFAULTS: Final = {
    "requests": {"cpu": "500m", "memory": "2Gi"},
    "limits": {"memory": "32Gi"},
}


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container's resources with defaults for each resource that the user does not set.

    A resource with a request or a limit of the user gets no default of the other kind: the default
    limit could be below the request, or the default request above the limit. GPUs and other devices
    have a domain in their names, as `nvidia.com/gpu`, or are claimed.
    given: The user's resources; its requests and limits are maps.
    """
    set_by_user = {name for part in ("requests", "limits") for name in given.get(part, {})}
    defaults = {
        part: {name: value for name, value in values.items() if name not in set_by_user}
        for part, values in _DEFAULTS.items()
    }
    if given.get("claims") or any("/" in name for name in set_by_user):
        defaults["limits"].pop("memory", None)
    merged = {part: {**defaults[part], **given.get(part, {})} for part in defaults}
    others = {name: value for name, value in given.items() if name not in _DEFAULTS}
    return {**others, **{part: values for part, values in merged.items() if values}}
