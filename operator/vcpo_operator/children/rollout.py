"""The Deployment of a rollout group."""

from collections.abc import Mapping

from vcpo.api.workloads import RolloutGroup
from vcpo_operator.children.manifest import Child, Kind, Manifest, Parent, build_child
from vcpo_operator.children.network import OperatorDefaults
from vcpo_operator.children.pod_template.resources import ModelNeeds, model_needs
from vcpo_operator.children.pod_template.template import (
    RUN_FILE_PATH,
    Workload,
    downloads_model,
    near,
    pod_template,
    queue_labels,
    transport_arguments,
)
from vcpo_operator.names import (
    LEARNER_PORT,
    ROLLOUT_HEALTH_PORT,
    ROLLOUT_METRICS_PORT,
    ROLLOUT_PORT,
    Role,
    learner_name,
    rollout_name,
    selector,
)


def rollout_deployment(
    parent: Parent, group: RolloutGroup, defaults: OperatorDefaults, replicas: int
) -> Child:
    """Build a group's Deployment with a number of workers.

    Raises: ValueError when the user's template cannot be merged.
    """
    spec: Manifest = {
        "replicas": replicas,
        # GPUs are scarce: a rolling update makes room before it starts a new worker.
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"},
        },
        "selector": {"matchLabels": selector(parent.name, Role.ROLLOUT, group.name)},
        "template": pod_template(parent, defaults, _workload(parent, group, defaults)),
    }
    return build_child(
        Kind.DEPLOYMENT,
        parent,
        rollout_name(parent.name, group.name),
        {"spec": spec},
        role=Role.ROLLOUT,
        group=group.name,
        extra_labels=queue_labels(parent, group),
    )


def _workload(parent: Parent, group: RolloutGroup, defaults: OperatorDefaults) -> Workload:
    gpus, by_default = _gpus(group)
    own = selector(parent.name, Role.ROLLOUT, group.name)
    is_packed = bool(gpus or by_default)  # so that whole machines stay free for others
    return Workload(
        role=Role.ROLLOUT,
        group=group.name,
        image=group.image or defaults.rollout_image,
        command=_command(parent, group, defaults.listen_address),
        port=ROLLOUT_PORT,
        health_port=ROLLOUT_HEALTH_PORT,
        metrics_port=ROLLOUT_METRICS_PORT,
        more_ports=[],
        drain_s=group.drain_seconds,
        threads=group.threads,
        gpus=gpus,
        gpus_by_default=by_default,
        needs=rollout_needs(parent),
        affinity=near(own, "kubernetes.io/hostname") if is_packed else {},
        variables=[],
        environment_secret=None,
        mounts=[],
        volumes=[],
        shares_memory=gpus > 1,
        template=group.template if is_packed else _template_with_spread(parent, group),
    )


def _gpus(group: RolloutGroup) -> tuple[int, int]:
    is_given = group.gpus is not None or group.tensor_parallel_size > 1
    return (group.gpus_asked, 0) if is_given else (0, group.gpus_asked)


def rollout_needs(parent: Parent) -> ModelNeeds | None:
    """Return what the model needs in a worker's pod: it holds a version while it loads it."""
    spec = parent.run.spec
    if spec.model.size_billions is None:
        return None
    return model_needs(
        spec.model.size_billions * 1e9,
        processes=1,
        bytes_per_parameter=8,
        shared=0,
        downloads=downloads_model(spec),
    )


def _command(parent: Parent, group: RolloutGroup, host: str) -> list[str]:
    return [
        "python",
        "-m",
        "vcpo_rollout",
        RUN_FILE_PATH,
        f"--learner={learner_name(parent.name)}:{LEARNER_PORT}",
        f"--group={group.name}",
        "--worker-id=$(POD_NAME)",
        f"--listen={host}:{ROLLOUT_PORT}",
        f"--metrics-listen={host}:{ROLLOUT_METRICS_PORT}",
        *transport_arguments(parent, f"{host}:{ROLLOUT_HEALTH_PORT}"),
        f"--drain-seconds={group.drain_seconds}",
    ]


def _template_with_spread(parent: Parent, group: RolloutGroup) -> Manifest:
    constraint = {
        "topologyKey": "kubernetes.io/hostname",
        "maxSkew": 1,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(parent.name, Role.ROLLOUT, group.name)},
    }
    spec = group.template.get("spec", {})
    if not isinstance(spec, Mapping):
        return group.template  # `merge_template` refuses it
    return {**group.template, "spec": {"topologySpreadConstraints": [constraint], **spec}}
