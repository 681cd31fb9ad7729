"""The claim for checkpoints and the trained model.

It is a claim of its own, not one of the StatefulSet's claim templates. Those cannot grow, and the
model would be deleted with the StatefulSet, which the clean-up of a complete run may delete. Pods
that train together write into one volume; its access mode cannot change.
"""

from __future__ import annotations

from vcpo.api.cluster import StorageRetention
from vcpo_operator.children.manifest import Child, Kind, Manifest, Parent, build_child
from vcpo_operator.names import Role, learner_name


def checkpoint_claim(parent: Parent) -> Child:
    """Build the claim; it outlives the run unless the spec says otherwise."""
    learner = parent.run.spec.learner
    spec: Manifest = {
        "accessModes": ["ReadWriteOnce" if learner.replicas == 1 else "ReadWriteMany"],
        "resources": {"requests": {"storage": f"{parent.run.spec.checkpoint_storage_gibibytes}Gi"}},
    }
    if learner.checkpoint_storage_class_name is not None:
        spec["storageClassName"] = learner.checkpoint_storage_class_name
    return build_child(
        Kind.CLAIM,
        parent,
        learner_name(parent.name),
        {"spec": spec},
        role=Role.LEARNER,
        owned=learner.checkpoint_storage_retention is StorageRetention.DELETE,
    )
