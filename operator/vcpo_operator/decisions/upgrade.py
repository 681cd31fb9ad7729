r"""Whether a run keeps the revision of its pods, or takes the newest one. Pure.

```
an edit of what pods depend on  -------------------------> take it, pods are replaced
only the operator, or `steps`  --> the learner is down -> take it, nothing is lost by it
                               --> it is up ------------> keep the old one; `upgradePolicy`
                                                          says until when
```
"""

from __future__ import annotations

from typing import Final

from vcpo.api import VCPORunSpec
from vcpo.api.cluster import UpgradePolicy
from vcpo.api.optimizer import Schedule
from vcpo_operator.children.revision import Revision

_UNTIL: Final = {
    UpgradePolicy.ON_RESTART: "the learner starts again",
    UpgradePolicy.NEVER: "an edit of the run replaces them",
}


def decide_revision(
    newest: Revision, kept: Revision | None, spec: VCPORunSpec, *, is_learner_down: bool
) -> tuple[Revision, str]:
    """Return the revision of a run's pods from now on, and why it is not the newest, in a sentence.

    newest: As this operator builds it from the spec.
    kept: The one in force; None when the run has no pods yet.
    is_learner_down: Whether the learner's pods end anyway, or are not there.
    """
    if kept is None:
        return newest, ""
    policy, is_same_but_for_steps = spec.upgrade_policy, _pods(kept) == _pods(newest)
    if is_same_but_for_steps and newest.steps == kept.steps:
        return newest, ""
    if is_same_but_for_steps and newest.steps > kept.steps and not _is_felt(spec):
        why = f"The learner takes the {kept.steps} steps that it was started for first."
        return (newest, "") if is_learner_down else (kept, why)
    is_same_spec = kept.generation == newest.generation or kept.spec == newest.spec
    is_edited = kept.keys != newest.keys or not is_same_spec
    is_upgrade_due = is_learner_down and policy is not UpgradePolicy.NEVER
    if is_edited or is_upgrade_due or policy is UpgradePolicy.RECREATE:
        return newest, ""
    return kept, (
        f"The operator builds other pods now; these stay until {_UNTIL[policy]} (`upgradePolicy`"
        f" '{policy}')."
    )


def _pods(revision: Revision) -> tuple[str, str]:
    return revision.base, revision.keys


def _is_felt(spec: VCPORunSpec) -> bool:
    return spec.optimizer.schedule is not Schedule.CONSTANT or any(
        group.noise is not None for group in spec.rollouts
    )
