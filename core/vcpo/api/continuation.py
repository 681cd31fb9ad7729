"""The part of a spec that may not change between a run and its continuation from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vcpo.api.run import VCPORun

_KEPT = {"model", "environment", "batch", "optimizer"}
_ABSENT = object()


def continuation_document(run: VCPORun) -> dict[str, Any]:
    """Return the parts of a spec on which a checkpoint's contents depend, as JSON.

    Steps, deadlines, workers, control and the choice of prompts are not among them.
    """
    document = run.spec.model_dump(mode="json", by_alias=True, include=_KEPT)
    document["environment"].pop("maxAbsoluteReward")  # a bound, not content
    document["model"].pop("sizeBillions")  # a hint for the volume
    # Memory layout and sampling order do not change what was learned.
    for field in (
        "microBatchTrajectories",
        "tokensPerMicroBatch",
        "overProvisionRatio",
        "promptPool",
        "promptSelection",
    ):
        document["batch"].pop(field)
    return document


def continuation_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str = "spec"
) -> Iterator[str]:
    """Yield each field that differs between two continuation documents, with both values."""
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from continuation_changes(old, new, f"{path}.{name}")
        elif old != new:
            yield f"{path}.{name}: {_format_value(old)} -> {_format_value(new)}"


def _format_value(value: object) -> str:
    return "nothing" if value is None or value is _ABSENT else repr(value)
