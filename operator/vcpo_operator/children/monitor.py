"""The PodMonitor by which a Prometheus operator scrapes a run's pods."""

from __future__ import annotations

from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import GROUP_LABEL, ROLE_LABEL, RUN_LABEL, selector

_INTERVAL = "15s"


def pod_monitor(parent: Parent) -> Child | None:
    """Build the PodMonitor; None unless the run asks for it."""
    if not parent.run.spec.pods.pod_monitor:
        return None
    body = {
        "spec": {
            "jobLabel": "app.kubernetes.io/name",
            "selector": {"matchLabels": selector(parent.name)},
            "podTargetLabels": [RUN_LABEL, ROLE_LABEL, GROUP_LABEL],
            "podMetricsEndpoints": [{"port": "metrics", "interval": _INTERVAL}],
        }
    }
    return build_child(Kind.POD_MONITOR, parent, parent.name, body)
