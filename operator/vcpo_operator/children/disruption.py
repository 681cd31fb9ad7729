"""PodDisruptionBudgets: a node drain takes one learner or half of a group at a time.

The learner's budget lets its pod go: it writes a checkpoint when asked to leave, and a budget of
zero would block node drains for as long as the run lasts.
"""

from __future__ import annotations

from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import Role, learner_name, rollout_name, selector


def disruption_budgets(parent: Parent) -> tuple[Child, ...]:
    """Build the budgets of the learner and of each group; none when they are not wanted."""
    if not parent.run.spec.pods.disruption_budgets:
        return ()
    groups = (_rollout(parent, group.name) for group in parent.run.spec.rollouts)
    return (_learner(parent), *groups)


def _learner(parent: Parent) -> Child:
    body = {
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(parent.name, Role.LEARNER)},
        }
    }
    return build_child(Kind.BUDGET, parent, learner_name(parent.name), body, role=Role.LEARNER)


def _rollout(parent: Parent, group: str) -> Child:
    body = {
        "spec": {
            "maxUnavailable": "50%",
            "selector": {"matchLabels": selector(parent.name, Role.ROLLOUT, group)},
        }
    }
    name = rollout_name(parent.name, group)
    return build_child(Kind.BUDGET, parent, name, body, role=Role.ROLLOUT, group=group)
