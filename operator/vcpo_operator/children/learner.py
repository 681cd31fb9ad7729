"""The learner's StatefulSet: one pod with a stable name and a volume, never two at a time.

`Parallel`, because an ordered StatefulSet cannot leave a broken revision by itself
(https://github.com/kubernetes/kubernetes/issues/67250). `OnDelete`, because the operator itself
replaces a pod of an old template, also a stuck one.
"""

from __future__ import annotations

from vcpo_operator.children.defaults import OperatorDefaults
from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.children.pod_template.template import (
    RUN_FILE_PATH,
    Workload,
    pod_template,
    queue_labels,
)
from vcpo_operator.names import (
    LEARNER_METRICS_PORT,
    LEARNER_PORT,
    Role,
    learner_name,
    selector,
)

RUN_DIR = "/var/lib/vcpo"
_LINGER_S = 86_400
"""Time in which a learner that has ended still answers, so that the operator learns of the end."""


def learner_stateful_set(parent: Parent, defaults: OperatorDefaults, *, replicas: int) -> Child:
    """Build the StatefulSet.

    replicas: 1, or 0 while the run is suspended.
    Raises: ValueError when the user's template cannot be merged.
    """
    body = {
        "spec": {
            "replicas": replicas,
            "serviceName": learner_name(parent.name),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": selector(parent.name, Role.LEARNER)},
            "template": pod_template(parent, defaults, _workload(parent, defaults)),
        }
    }
    return build_child(
        Kind.STATEFUL_SET,
        parent,
        learner_name(parent.name),
        body,
        role=Role.LEARNER,
        extra_labels=queue_labels(parent),
    )


def _workload(parent: Parent, defaults: OperatorDefaults) -> Workload:
    settings = parent.run.spec.learner
    claim = {"persistentVolumeClaim": {"claimName": learner_name(parent.name)}}
    return Workload(
        role=Role.LEARNER,
        group=None,
        image=settings.image or defaults.learner_image,
        command=_command(settings.drain_seconds),
        port=LEARNER_PORT,
        metrics_port=LEARNER_METRICS_PORT,
        drain_s=settings.drain_seconds,
        threads=settings.threads,
        environment_secret=parent.run.spec.tracking.secret_name,
        # A folder of this run alone: a retained claim may hold the checkpoints of an earlier run.
        mounts=[{"name": "run", "mountPath": RUN_DIR, "subPath": parent.owner.uid}],
        volumes=[{"name": "run", **claim}],
        template=settings.template,
    )


def _command(drain_s: int) -> list[str]:
    return [
        "python",
        "-m",
        "vcpo_learner",
        RUN_FILE_PATH,
        f"--run-dir={RUN_DIR}",
        f"--listen=0.0.0.0:{LEARNER_PORT}",
        f"--metrics-listen=0.0.0.0:{LEARNER_METRICS_PORT}",
        "--resume",
        f"--drain-seconds={drain_s}",
        f"--linger-seconds={_LINGER_S}",
    ]
