"""The PodMonitor by which a Prometheus operator scrapes a run's pods."""

from __future__ import annotations

from vcpo_operator.children.defaults import OperatorDefaults
from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.names import GROUP_LABEL, ROLE_LABEL, RUN_LABEL, selector

_INTERVAL = "15s"


def pod_monitor(parent: Parent, defaults: OperatorDefaults) -> Child | None:
    """Build the PodMonitor; None unless the run asks for it, or if the chart's selects its pods.

    Two monitors would scrape each pod twice, and every `sum()` would count double.
    """
    if not parent.run.spec.pods.pod_monitor or defaults.shared_pod_monitor:
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


def skipped_monitor_note(parent: Parent, defaults: OperatorDefaults) -> str:
    """Return a sentence if the run asks for a PodMonitor and gets none; else an empty string."""
    if not parent.run.spec.pods.pod_monitor or not defaults.shared_pod_monitor:
        return ""
    return (
        "The run gets no PodMonitor of its own (`pods.podMonitor`), because the chart's"
        " (`metrics.podMonitor`) selects its pods already: two would count everything double."
    )
