"""Takes groups that break the update out of ledger and replay, and keeps each in quarantine."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vcpo_learner.training.parts import TrainingParts
from vcpo_learner.training.quarantine import Quarantine


class Exclusion:
    """Excludes groups of one run. Owner: the event loop, while no step is under way."""

    def __init__(self, parts: TrainingParts, quarantine: Quarantine) -> None:
        self._parts = parts
        self._quarantine = quarantine

    def exclude_again(self, step: int) -> None:
        """Exclude what was excluded before; an older state may hold it."""
        self.exclude(self._quarantine.excluded_lease_ids(), {}, step)

    def exclude(self, lease_ids: Collection[str], reasons: Mapping[str, str], step: int) -> None:
        """Remove groups that break the update from ledger and replay; write each to disk once.

        reasons: why each group is excluded, by lease; the learner died with the others.
        """
        kept = self._quarantine.kept_lease_ids()
        excluded = self._parts.update.forget(lease_ids)
        prompts: dict[str, int] = {}
        for group in self._parts.dispatcher.ledger.quarantine(lease_ids):
            excluded[group.lease_id] = group.trajectories
            prompts[group.lease_id] = group.prompt_index
        for lease_id, trajectories in excluded.items():
            if lease_id in kept:
                continue
            deaths = f"the learner died {self._quarantine.deaths(lease_id)} times in a step with it"
            reason = reasons.get(lease_id, deaths)
            prompt = prompts.get(lease_id)
            try:
                path = self._quarantine.keep(
                    lease_id, trajectories, prompt_index=prompt, reason=reason, step=step
                )
                where = f"stored in {path}"
            except OSError as error:
                where = f"it cannot be stored ({error.strerror})"
            what = "kept for replay" if prompt is None else f"prompt {prompt}"
            self._parts.event(
                "GroupQuarantined",
                f"{lease_id} ({what}) is not trained on: {reason}; {where}",
            )
