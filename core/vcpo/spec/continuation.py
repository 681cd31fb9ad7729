"""What must stay the same between a run and its continuation from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vcpo.spec.run import VCPORun

_KEPT = {"model", "environment", "batch", "optimizer"}
_ABSENT = object()


def continuation_document(run: VCPORun) -> dict[str, Any]:
    """The parts of a spec that a checkpoint's contents depend on, as JSON has them.

    Steps, deadlines, workers, control and the choice of prompts may change from one start to the
    next.
    """
    document = run.spec.model_dump(mode="json", by_alias=True, include=_KEPT)
    for bound in ("maxAbsoluteReward", "callTimeoutSeconds"):  # change nothing within them
        document["environment"].pop(bound)
    # Neither how the batch is cut for memory nor what is sampled for it changes what was learned.
    for field in (
        "microBatchTrajectories",
        "overProvisionRatio",
        "promptPool",
        "promptSelection",
    ):
        document["batch"].pop(field)
    return document


def continuation_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str = "spec"
) -> Iterator[str]:
    """Each field that differs between two continuation documents, with its old and new value."""
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from continuation_changes(old, new, f"{path}.{name}")
        elif old != new:
            yield f"{path}.{name}: {_shown(old)} -> {_shown(new)}"


def _shown(value: object) -> str:
    return "nothing" if value is None or value is _ABSENT else repr(value)
