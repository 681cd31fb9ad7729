"""The learner's StatefulSet: pods with stable names and one volume, never two of one name.

`Parallel`, because an ordered StatefulSet cannot leave a broken revision by itself
(https://github.com/kubernetes/kubernetes/issues/67250), and because pods that train together wait
for each other. `OnDelete`, because the operator itself replaces pods of an old template, also stuck
ones.

Ranks find each other by torchrun's variables. A pod of one rank has them in its environment; a pod
of several starts torchrun, which gives them to its processes. The first pod is where all meet
(docs/inside/learner.md).
"""

from vcpo.api import GpuUse, with_gpu_defaults
from vcpo.api.workloads import Precision
from vcpo.service.logs import POD_VARIABLE
from vcpo_operator.children.manifest import Child, Kind, Manifest, Parent, build_child
from vcpo_operator.children.network import OperatorDefaults
from vcpo_operator.children.pod_template.resources import ModelNeeds, model_needs
from vcpo_operator.children.pod_template.template import (
    GRACE_MARGIN_S,
    RUN_FILE_PATH,
    Workload,
    downloads_model,
    near,
    pod_template,
    transport_arguments,
)
from vcpo_operator.names import (
    LEARNER_HEALTH_PORT,
    LEARNER_METRICS_PORT,
    LEARNER_PORT,
    LEARNER_WEIGHTS_PORT,
    POD_INDEX_LABEL,
    RENDEZVOUS_PORT,
    Role,
    learner_name,
    ranks_host,
    ranks_name,
    selector,
)

RUN_DIR = "/var/lib/vcpo"
_LINGER_S = 86_400
"""Time in which a learner that has ended still answers, so that the operator learns of the end."""
_KILL_MARGIN_S = 10
"""How long before the end of its grace period a pod kills ranks that have not ended."""
_INDEX_VARIABLE = "POD_INDEX"


def learner_stateful_set(parent: Parent, defaults: OperatorDefaults, *, running: bool) -> Child:
    """Build the StatefulSet.

    Raises: ValueError when the user's template cannot be merged.
    """
    body = {
        "spec": {
            "replicas": parent.run.spec.learner.replicas if running else 0,
            "serviceName": _service_name(parent),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": selector(parent.name, Role.LEARNER)},
            "template": pod_template(parent, defaults, _workload(parent, defaults)),
        }
    }
    return build_child(
        Kind.STATEFUL_SET, parent, learner_name(parent.name), body, role=Role.LEARNER
    )


def _workload(parent: Parent, defaults: OperatorDefaults) -> Workload:
    settings = parent.run.spec.learner
    claim = {"persistentVolumeClaim": {"claimName": learner_name(parent.name)}}
    return Workload(
        role=Role.LEARNER,
        group=None,
        image=settings.image or defaults.learner_image,
        command=[*_launcher(parent), *_arguments(parent, defaults.listen_address)],
        port=LEARNER_PORT,
        health_port=LEARNER_HEALTH_PORT,
        metrics_port=LEARNER_METRICS_PORT,
        more_ports=_weights_ports(settings.ranks_per_replica),
        drain_s=settings.drain_seconds,
        threads=settings.threads,
        gpus=settings.gpus_per_replica or 0,
        gpus_by_default=0,
        needs=learner_needs(parent),
        affinity=_together(parent),
        variables=_rank_variables(parent),
        environment_secret=parent.run.spec.tracking.secret_name,
        # A folder of this run alone: a retained claim may hold the checkpoints of an earlier run.
        mounts=[{"name": "run", "mountPath": RUN_DIR, "subPath": parent.owner.uid}],
        volumes=[{"name": "run", **claim}],
        shares_memory=settings.ranks_per_replica > 1 or parent.run.spec.weights.store_url is None,
        template=settings.template,
    )


def learner_needs(parent: Parent) -> ModelNeeds | None:
    """Return what the model needs in a pod: copies for the next checkpoint, and a version.

    The copies are 12 bytes for each trained parameter, over all pods; the version is in the number
    format in which it is published: in float32 in memory and in a file, in bfloat16 in the file.
    """
    spec = parent.run.spec
    if spec.model.size_billions is None:
        return None
    published = with_gpu_defaults(spec, GpuUse.from_spec(spec)).published_precision
    is_float32 = published is Precision.FLOAT32
    version = 0 if spec.model.lora is not None else (4 if is_float32 else 2)
    shared = 0 if spec.weights.store_url is not None else version
    copies = 4 if spec.model.lora is not None else 12 / spec.learner.replicas
    return model_needs(
        spec.model.size_billions * 1e9,
        processes=spec.learner.ranks_per_replica,
        bytes_per_parameter=copies + version + (shared if is_float32 else 0),
        shared=shared,
        downloads=downloads_model(spec),
    )


def _together(parent: Parent) -> Manifest:
    if parent.run.spec.learner.replicas == 1:
        return {}
    return near(selector(parent.name, Role.LEARNER), "topology.kubernetes.io/zone")


def _weights_ports(num_ranks: int) -> list[Manifest]:
    names = ["weights", *(f"weights-{rank}" for rank in range(1, num_ranks))]
    return [
        {"name": name, "containerPort": LEARNER_WEIGHTS_PORT + rank}
        for rank, name in enumerate(names)
    ]


def _service_name(parent: Parent) -> str:
    has_group = parent.run.spec.learner.replicas > 1
    return ranks_name(parent.name) if has_group else learner_name(parent.name)


def _launcher(parent: Parent) -> list[str]:
    learner = parent.run.spec.learner
    if learner.ranks_per_replica == 1:
        return ["python", "-m", "vcpo_learner"]
    where = [f"--nnodes={learner.replicas}"]
    if learner.replicas > 1:
        where += [f"--node-rank=$({_INDEX_VARIABLE})", f"--master-addr={_first_pod(parent)}"]
    else:
        # Not `--standalone`: its agent unpickles what its store holds.
        where += ["--master-addr=127.0.0.1"]
    port, processes = RENDEZVOUS_PORT, learner.ranks_per_replica
    where += [f"--master-port={port}", f"--nproc-per-node={processes}"]
    # torchrun, in a process that SIGTERM ends while it imports, also where it is the first.
    entry = ["python", "-m", "vcpo.service.process", "torch.distributed.run"]
    return [*entry, *where, "-m", "vcpo_learner"]


def _rank_variables(parent: Parent) -> list[Manifest]:
    """Return the environment variables by which ranks find each other."""
    learner = parent.run.spec.learner
    if learner.ranks == 1:
        return []
    index = {"fieldPath": f"metadata.labels['{POD_INDEX_LABEL}']"}
    variables = [{"name": _INDEX_VARIABLE, "valueFrom": {"fieldRef": index}}]
    if learner.ranks_per_replica == 1:
        values = {
            "RANK": f"$({_INDEX_VARIABLE})",
            "WORLD_SIZE": str(learner.ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": _first_pod(parent),
            "MASTER_PORT": str(RENDEZVOUS_PORT),
        }
    else:
        values = {
            # torchrun kills its ranks 30 s after SIGTERM, in the middle of a checkpoint.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(
                learner.drain_seconds + GRACE_MARGIN_S - _KILL_MARGIN_S
            )
        }
    return [*variables, *({"name": name, "value": value} for name, value in values.items())]


def _first_pod(parent: Parent) -> str:
    return f"{learner_name(parent.name)}-0.{ranks_name(parent.name)}"


def _arguments(parent: Parent, host: str) -> list[str]:
    has_group = parent.run.spec.learner.replicas > 1
    return [
        RUN_FILE_PATH,
        f"--run-dir={RUN_DIR}",
        f"--listen={host}:{LEARNER_PORT}",
        f"--metrics-listen={host}:{LEARNER_METRICS_PORT}",
        f"--weights-listen={host}:{LEARNER_WEIGHTS_PORT}",
        *(
            [f"--weights-host=$({POD_VARIABLE}).{ranks_host(parent.owner.key)}"]
            if has_group
            else []
        ),
        "--resume",
        *transport_arguments(parent, f"{host}:{LEARNER_HEALTH_PORT}"),
        f"--drain-seconds={parent.run.spec.learner.drain_seconds}",
        f"--linger-seconds={_LINGER_S}",
    ]
