"""What Kueue admits as one unit, and what is a workload of its own.

```
unit             the learner's pods, and those of each group of a fixed size: one group of pods
of their own     groups that may grow (`maxReplicas` above `minReplicas`): their Deployments
```
Kueue admits a group of pods only whole, and deletes pods beyond its size. So a group that may grow
cannot be in it: a run that needs a number of workers and wants more has two groups. The size is
part of the group's name: with another size it is another group.
Source: https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/
"""

from __future__ import annotations

from vcpo.api import VCPORunSpec
from vcpo.api.workloads import RolloutGroup
from vcpo_operator.children.manifest import Parent
from vcpo_operator.names import QUEUE_LABEL, learner_name

_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
_SIZE_ANNOTATION = "kueue.x-k8s.io/pod-group-total-count"
_SERVING_ANNOTATION = "kueue.x-k8s.io/pod-group-serving"
"""`true`: pods are replaced, and the group does not end with them."""


def workload_labels(parent: Parent, group: RolloutGroup) -> dict[str, str]:
    """Return the labels of a group's Deployment, if it is a workload of its own."""
    queue = parent.run.spec.pods.queue_name
    return {} if queue is None or _is_fixed(group) else {QUEUE_LABEL: queue}


def pod_metadata(parent: Parent, group: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return labels and annotations of the pods of a group; None: of the learner."""
    spec = parent.run.spec
    queue = spec.pods.queue_name
    if queue is None:
        return {}, {}
    labels = {QUEUE_LABEL: queue}
    if not all(_is_fixed(each) for each in spec.rollouts if each.name == group):
        return labels, {}
    size = _unit_size(spec)
    labels[_GROUP_LABEL] = f"{learner_name(parent.name)}-{size}"
    return labels, {_SIZE_ANNOTATION: str(size), _SERVING_ANNOTATION: "true"}


def _unit_size(spec: VCPORunSpec) -> int:
    fixed = (group.min_replicas for group in spec.rollouts if _is_fixed(group))
    return spec.learner.replicas + sum(fixed)


def _is_fixed(group: RolloutGroup) -> bool:
    return group.min_replicas == group.max_replicas
