"""The learner's headless Service: a stable address that follows the pod, ready or not.

It publishes not-ready addresses: workers connect while the learner still loads its model, and the
operator also reads reports of a learner that has a problem.
"""

from __future__ import annotations

from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import LEARNER_METRICS_PORT, LEARNER_PORT, Role, learner_name, selector


def learner_service(parent: Parent) -> Child:
    """Build the Service."""
    body = {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector(parent.name, Role.LEARNER),
            "ports": [
                {"name": "grpc", "port": LEARNER_PORT, "targetPort": "grpc"},
                {"name": "metrics", "port": LEARNER_METRICS_PORT, "targetPort": "metrics"},
            ],
        }
    }
    return build_child(Kind.SERVICE, parent, learner_name(parent.name), body, role=Role.LEARNER)
