"""The learner's headless Services: stable addresses that follow the pods, ready or not.

One leads to the pod in which rank 0 serves. It publishes not-ready addresses: workers connect while
the learner still loads its model, and the operator also reads reports of a learner that has a
problem. The other one exists if the learner has several pods, and gives each of them a host name.
The pods meet before any of them is ready.
"""

from __future__ import annotations

from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import (
    LEARNER_METRICS_PORT,
    LEARNER_PORT,
    LEARNER_WEIGHTS_PORT,
    RENDEZVOUS_PORT,
    Role,
    leader_selector,
    learner_name,
    ranks_name,
    selector,
)


def learner_service(parent: Parent) -> Child:
    """Build the Service of rank 0."""
    body = {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": leader_selector(parent.name),
            "ports": [
                {"name": "grpc", "port": LEARNER_PORT, "targetPort": "grpc"},
                {"name": "metrics", "port": LEARNER_METRICS_PORT, "targetPort": "metrics"},
                {"name": "weights", "port": LEARNER_WEIGHTS_PORT, "targetPort": "weights"},
            ],
        }
    }
    return build_child(Kind.SERVICE, parent, learner_name(parent.name), body, role=Role.LEARNER)


def ranks_service(parent: Parent) -> Child | None:
    """Build the Service of all ranks; None if the learner has one pod."""
    if parent.run.spec.learner.replicas == 1:
        return None
    body = {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector(parent.name, Role.LEARNER),
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
        }
    }
    return build_child(Kind.SERVICE, parent, ranks_name(parent.name), body, role=Role.LEARNER)
