r"""Whether a run keeps the revision of its pods, or takes the newest one. Pure.

```
the user changed what pods depend on  ------------------> take it, pods are replaced
only the operator, or `steps`  --> the learner is down -> take it, nothing is lost by it
                               --> it is up ------------> keep the old one; `upgradePolicy`
                                                          says until when
```
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from pydantic import ValidationError

from vcpo.api import VCPORunSpec
from vcpo.api.cluster import UpgradePolicy
from vcpo.api.optimizer import Schedule
from vcpo_operator.children.config import pod_fields
from vcpo_operator.children.revision import Revision, changes, template_changes

_NAMED_CHANGES: Final = 3
"""Changes that a message names."""
_POLICIES: Final = {
    UpgradePolicy.RECREATE: "the pods are replaced when other runs that upgrade have started again",
    UpgradePolicy.ON_RESTART: "the pods stay as they are until the learner starts again",
    UpgradePolicy.NEVER: "the pods stay as they are until an edit of the run replaces them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionDecision:
    """The revision of a run's pods, and why it is this one."""

    revision: Revision
    newest: str = ""
    """Name of the newest one, if the pods are not of it."""
    pending: str = ""
    """Why they are not, in a sentence; empty when they are."""
    replacement: str = ""
    """Why pods are replaced now, in a sentence; empty when none are."""
    awaits_turn: bool = False
    """Whether only other runs' upgrades keep this one from taking the newest revision."""


def decide_revision(
    newest: Revision,
    kept: Revision | None,
    spec: VCPORunSpec,
    *,
    is_learner_down: bool,
    has_turn: bool,
) -> RevisionDecision:
    """Return the revision that a run's pods have from now on.

    newest: As this operator builds it from the spec.
    kept: The one in force; None when the run has no learner yet.
    is_learner_down: Whether the learner's pods end anyway, or are not there.
    has_turn: Whether an upgrade alone may replace the pods now.
    """
    if kept is None or kept.name == newest.name:
        return RevisionDecision(revision=newest)
    edits = _edits(newest, kept)
    if _is_more_steps(edits, newest, kept, spec) and not is_learner_down:
        after = f"the learner takes the {kept.steps} steps that it was started for first"
        return RevisionDecision(
            revision=kept, newest=newest.name, pending=f"{_list_changes(edits)}; {after}."
        )
    if edits:
        return RevisionDecision(
            revision=newest, replacement=f"The run was edited: {_list_changes(edits)}."
        )
    # Images first: they say which version it is.
    built = sorted(template_changes(kept, newest), key=lambda each: ".image: " not in each)
    why = f"The operator builds other pods now: {_list_changes(built)}"
    is_upgrade_wanted = is_learner_down and spec.upgrade_policy is not UpgradePolicy.NEVER
    if is_upgrade_wanted or (has_turn and spec.upgrade_policy is UpgradePolicy.RECREATE):
        return RevisionDecision(revision=newest, replacement=f"{why}.")
    policy = spec.upgrade_policy
    return RevisionDecision(
        revision=kept,
        newest=newest.name,
        pending=f"{why}; {_POLICIES[policy]} (`upgradePolicy` '{policy}').",
        awaits_turn=policy is UpgradePolicy.RECREATE,
    )


def _edits(newest: Revision, kept: Revision) -> list[str]:
    """Return what the user changed. A field that is new in this version has no older value."""
    before: Mapping[str, Any] = kept.fields
    with contextlib.suppress(ValidationError):  # a field that this version does not have
        before = pod_fields(VCPORunSpec.model_validate(dict(before)))
    found = list(changes(before, newest.fields, "spec"))
    return [*found, "the run's keys"] if kept.keys != newest.keys else found


def _is_more_steps(edits: list[str], newest: Revision, kept: Revision, spec: VCPORunSpec) -> bool:
    """Whether the only edit is a larger number of steps, which the steps before do not feel."""
    is_felt = spec.optimizer.schedule is not Schedule.CONSTANT or any(
        group.noise is not None for group in spec.rollouts
    )
    return len(edits) == 1 and newest.steps > kept.steps > 0 and not is_felt


def _list_changes(found: Any) -> str:
    """Return the first changes, and how many there are more."""
    all_changes = list(found)
    named = ", ".join(islice(all_changes, _NAMED_CHANGES))
    more = len(all_changes) - _NAMED_CHANGES
    return f"{named} and {more} more" if more > 0 else named
