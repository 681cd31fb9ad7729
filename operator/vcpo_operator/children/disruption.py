"""PodDisruptionBudgets: a node drain evicts the learner, or half of a rollout group at a time.

The learner's budget allows its eviction. The learner writes a checkpoint on SIGTERM, and a budget
of zero would block node drains as long as the run lasts.
"""

from __future__ import annotations

from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import Role, learner_name, rollout_name, selector


def learner_budget(parent: Parent) -> Child:
    """Build the budget of the learner."""
    body = {
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(parent.name, Role.LEARNER)},
        }
    }
    return build_child(Kind.BUDGET, parent, learner_name(parent.name), body, role=Role.LEARNER)


def rollout_budget(parent: Parent, group: str) -> Child:
    """Build the budget of a rollout group."""
    body = {
        "spec": {
            "maxUnavailable": "50%",
            "selector": {"matchLabels": selector(parent.name, Role.ROLLOUT, group)},
        }
    }
    name = rollout_name(parent.name, group)
    return build_child(Kind.BUDGET, parent, name, body, role=Role.ROLLOUT, group=group)
