"""What must stay the same between a run and its continuation from a checkpoint."""

from __future__ import annotations

import hashlib
import json

from vcpo.spec.run import VCPORun

_KEPT = {"model", "environment", "batch", "optimizer"}


def continuation_digest(run: VCPORun) -> str:
    """SHA-256 of the parts of a spec that a checkpoint's contents depend on.

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
        "redundantTrajectories",
    ):
        document["batch"].pop(field)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
