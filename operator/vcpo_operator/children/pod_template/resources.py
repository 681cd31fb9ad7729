"""Resources that a container asks for where neither spec nor template says how much.

```
              CPU request      memory request                 memory limit   disk request
without GPU   half a core      2Gi, or what the model needs   32Gi, or more  -
                               if its size is known           if it needs it
with GPUs     3 cores a GPU    8Gi a GPU, or the same         -              -
any pod that downloads a model of known size                                 the model and 10Gi
```
- Requests let the scheduler and quotas count the pod, and a node under pressure evicts first what
  uses more than it asked for. Without a GPU they are small: a learner and two workers start on a
  machine with two cores.
- A memory limit keeps a process that leaks memory from ending its neighbors. A pod that reaches the
  limit reports `OOMKilled`. A pod with GPUs has none: only the user knows the size of such a model.
- No CPU limit: requests share a busy node fairly, and three cores fit beside one GPU on the
  smallest machines that have one.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vcpo.api import asks_for_accelerators

_QUANTITY: Final = re.compile(
    r"^[+-]?(\d+|\d+\.\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?(\d+|\d+\.\d*|\.\d+))?$"
)
"""A quantity as the API server reads it."""
_CORES_OF_GPU: Final = 3
_GIBIBYTES_OF_GPU: Final = 8
_LIMIT_BYTES: Final = 32 * 2**30
DISK_BYTES: Final = 10 * 2**30
"""Disk of a container for logs, caches of compilers and the like."""
_DOWNLOADED_BYTES: Final = 4
"""Bytes of a parameter in the files of a model, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """What a model of known size needs on the machine of a pod, beside GPU memory; in bytes."""

    memory: float
    """Host memory, `shared` included."""
    shared: float
    download: float
    """Files of the model; 0 if the pod downloads none."""


def model_needs(
    parameters: float, *, processes: int, bytes_per_parameter: float, shared: float, downloads: bool
) -> ModelNeeds:
    """Return what the processes of a pod need."""
    return ModelNeeds(
        memory=processes * 5 * 2**30 + parameters * bytes_per_parameter,
        shared=processes * 2**30 + 2 * parameters * shared,  # a version, and the next one
        download=parameters * _DOWNLOADED_BYTES if downloads else 0.0,
    )


def gibibytes(amount: float) -> str:
    """Return bytes as a quantity, rounded up to whole GiB."""
    return f"{math.ceil(amount / 2**30)}Gi"


def with_defaults(
    given: Mapping[str, Any], *, gpus: int = 0, needs: ModelNeeds | None = None
) -> dict[str, Any]:
    """Return a container's resources with defaults for each resource that the user does not set.

    A resource with a request or a limit of the user gets no default of the other kind: the default
    limit could be below the request, or the default request above the limit.
    """
    set_by_user = {name for part in ("requests", "limits") for name in given.get(part, {})}
    defaults = {
        part: {name: value for name, value in values.items() if name not in set_by_user}
        for part, values in _defaults(asks_for_accelerators(given), gpus, needs).items()
    }
    merged = {part: {**defaults[part], **given.get(part, {})} for part in defaults}
    others = {name: value for name, value in given.items() if name not in defaults}
    return {**others, **{part: values for part, values in merged.items() if values}}


def _defaults(has_devices: bool, gpus: int, needs: ModelNeeds | None) -> dict[str, dict[str, str]]:
    least = (gpus * _GIBIBYTES_OF_GPU or 2) * 2**30
    memory = least if needs is None else needs.memory
    cpu = str(gpus * _CORES_OF_GPU) if gpus else "500m"
    requests = {"cpu": cpu, "memory": gibibytes(memory)}
    limits = {} if has_devices else {"memory": gibibytes(max(memory, _LIMIT_BYTES))}
    if needs is not None and needs.download:
        requests["ephemeral-storage"] = gibibytes(needs.download + DISK_BYTES)
    return {"requests": requests, "limits": limits}


def memory_note(name: str, container: Mapping[str, Any], needs: ModelNeeds | None) -> Iterator[str]:
    """Yield that a container's memory limit is below what its model needs, if it is, with the fix.

    It is no error: what a model needs is an estimate.
    """
    limit = str(container["resources"].get("limits", {}).get("memory", ""))
    if needs is not None and limit and _amount(limit) < needs.memory:
        yield (
            f"The memory limit {limit} of {name} is below the {gibibytes(needs.memory)} that a"
            " model of `model.sizeBillions` needs: raise it in the template, or leave it out."
        )


def _amount(quantity: str) -> float:
    found = _QUANTITY.match(quantity)
    assert found is not None, quantity  # `quantity_problems` refuses others
    number, unit = found[1], found[2] or ""
    if unit[:1] in ("e", "E") and len(unit) > 1 and unit != "Ei":
        return float(number + unit)
    power = "num kMGTPE".index(unit[0].replace("K", "k")) - 3 if unit else 0
    return float(number) * (1024.0 if unit.endswith("i") else 1000.0) ** power


def quantity_problems(resources: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield what is no quantity among requests and limits, with its path and the fix."""
    for part in ("requests", "limits"):
        for name, value in (resources.get(part) or {}).items():
            if not _QUANTITY.match(str(value)):
                like = "a number with a unit such as '48Gi', '500m' or '2'"
                yield f"`{path}.{part}[{name}]` is {value!r}; write {like}"
