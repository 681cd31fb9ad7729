"""The VCPORolloutScaler of a rollout group, on which an external autoscaler acts.

Its manifest never holds `spec.replicas`. The operator sets that number once, when it creates the
scaler; from then on the autoscaler owns it.
"""

from __future__ import annotations

from vcpo.spec.workloads import RolloutGroup
from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import Role, rollout_name


def rollout_scaler(parent: Parent, group: RolloutGroup) -> Child:
    """Build a group's scaler."""
    return build_child(
        Kind.SCALER,
        parent,
        rollout_name(parent.name, group.name),
        {"spec": {"group": group.name}},
        role=Role.ROLLOUT,
        group=group.name,
    )
