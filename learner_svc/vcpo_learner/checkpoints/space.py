"""Room on the disk for a run's checkpoints and its model, judged before the first step."""

from __future__ import annotations

from dataclasses import dataclass

from vcpo_learner.checkpoints.disk import size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceNeed:
    """What a run writes, in bytes."""

    checkpoint_bytes: int
    """Tensors of one checkpoint."""
    num_checkpoints: int
    """Most checkpoints on the disk at once, with the one that is being written."""
    model_bytes: int
    """The final model, and adapters."""

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.num_checkpoints * self.checkpoint_bytes + self.model_bytes


def lacks_one_checkpoint(need: SpaceNeed, *, free_bytes: int) -> bool:
    """Return whether not even the next checkpoint fits."""
    return free_bytes < need.checkpoint_bytes


def space_warning(need: SpaceNeed, *, free_bytes: int, held_bytes: int) -> str | None:
    """Return a sentence with the numbers and the fields if not everything fits; else None.

    held_bytes: of checkpoints that are there already; later ones take their place.
    """
    missing_bytes = need.total_bytes - held_bytes - free_bytes
    if missing_bytes <= 0:
        return None
    return (
        f"{size_text(free_bytes)} are free and {size_text(missing_bytes)} are missing for"
        f" {need.num_checkpoints} checkpoints of {size_text(need.checkpoint_bytes)} each"
        f" (spec.checkpoint.keep, keepBest, and the one being written) and the model of"
        f" {size_text(need.model_bytes)}; lower spec.checkpoint.keep, or give more room (in a"
        " cluster spec.learner.checkpointStorageGibibytes)"
    )
