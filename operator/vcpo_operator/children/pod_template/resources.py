"""What a learner or worker asks of its node where the user's template does not say.

*Requests* let the scheduler and quotas count the pod. They are small enough that a learner and two
workers start on a machine with two cores; who trains a real model says what it needs.
*A limit on memory* keeps one process that leaks from ending its neighbors; who needs more asks for
it, and a pod that hits its limit says `OOMKilled`. *No limit on CPU*: throttling a process in
mid-step helps nobody, and requests share a busy node fairly. *No GPU*: most nodes have none.
*No limit on memory beside a GPU*: who asks for one trains a model whose size only they know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_DEFAULTS: Final = {
    "requests": {"cpu": "500m", "memory": "2Gi"},
    "limits": {"memory": "32Gi"},
}


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """A container's resources, with our words on each resource of which the user has said nothing.

    Who gives a request or a limit for memory gives all that there is to say of it: our limit could
    be below that request, and our request above that limit. GPUs and their like have a domain in
    their names, as `nvidia.com/gpu`, or are claimed.
    given: Its shape is checked: what it has of requests and limits are maps.
    """
    spoken_of = {name for part in ("requests", "limits") for name in given.get(part, {})}
    defaults = {
        part: {name: value for name, value in values.items() if name not in spoken_of}
        for part, values in _DEFAULTS.items()
    }
    if given.get("claims") or any("/" in name for name in spoken_of):
        defaults["limits"].pop("memory", None)
    merged = {part: {**defaults[part], **given.get(part, {})} for part in defaults}
    others = {name: value for name, value in given.items() if name not in _DEFAULTS}
    return {**others, **{part: values for part, values in merged.items() if values}}
