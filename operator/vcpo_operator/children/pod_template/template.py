"""The pod template of a role: security, files, identity, probes.

Pods meet the Pod Security Standard "restricted". The user's templates, of all pods and of the
role, are merged over this one and may loosen it. They cannot change the labels of selectors and the
digests.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vcpo.api import VCPORunSpec, asks_for_accelerators
from vcpo.api.cluster import Transport
from vcpo.api.workloads import RolloutGroup
from vcpo.service.lifecycle import SERVICE_ENVIRONMENT
from vcpo.service.logs import END_VARIABLE, NAMESPACE_VARIABLE, POD_VARIABLE
from vcpo.service.model_files import CACHE_VARIABLE
from vcpo.wire.access.roles import LEARNER_ROLES, WORKER_ROLES
from vcpo_operator.children.manifest import Child, Manifest, Parent, digest
from vcpo_operator.children.network import OperatorDefaults
from vcpo_operator.children.pod_template.overlay import merge_template
from vcpo_operator.children.pod_template.resources import (
    DISK_BYTES,
    ModelNeeds,
    gibibytes,
    quantity_problems,
    with_defaults,
)
from vcpo_operator.names import (
    QUEUE_LABEL,
    RUN_FILE,
    TEMPLATE_HASH_ANNOTATION,
    Role,
    account_name,
    certificates_name,
    config_name,
    credential_name,
    labels,
    learner_name,
)

CONFIG_PATH: Final = "/etc/vcpo"
TLS_PATH: Final = "/etc/vcpo-tls"
SCRATCH_PATH: Final = "/tmp"  # noqa: S108 - an emptyDir of the pod's own
RUN_FILE_PATH: Final = f"{CONFIG_PATH}/{RUN_FILE}"

CACHE_PATH: Final = "/var/cache/vcpo"
"""Where the claim for models is mounted, if the run has one."""

_USER = 65_532
_IMAGE: Final = re.compile(
    r"([\w.:\[\]-]+/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:\w[\w.-]*)?(@[a-z0-9]+:[0-9a-f]+)?", re.ASCII
)
GRACE_MARGIN_S: Final = 30
"""Time after draining to write, close and exit, before the kubelet kills the process."""
_STARTUP_PERIOD_S = 2
"""Short: the pod counts as not ready until a startup probe has succeeded."""
_STARTUP_PROBES = 1800
_PROBE_PERIOD_S = 10
_LIVENESS_FAILURES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What distinguishes the pods of one role or group."""

    role: Role
    group: str | None
    image: str
    command: Sequence[str]
    port: int
    health_port: int
    metrics_port: int
    more_ports: Sequence[Manifest]
    drain_s: int
    """Time to finish work after SIGTERM, without the margin for writing and exiting."""
    threads: int | None
    gpus: int
    """GPUs of the container; 0 leaves them to the user's template."""
    gpus_by_default: int
    """GPUs of a container that asks for no device otherwise."""
    needs: ModelNeeds | None
    affinity: Manifest
    variables: Sequence[Manifest]
    environment_secret: str | None
    mounts: Sequence[Manifest]
    volumes: Sequence[Manifest]
    shares_memory: bool
    """Whether processes of the container exchange tensors, or files of weights, in /dev/shm."""
    template: Mapping[str, Any]

    @property
    def place(self) -> str:
        group = "" if self.group is None else f"rollouts[{self.group}]"
        return f"spec.{group or 'learner'}.template"


def pod_template(parent: Parent, defaults: OperatorDefaults, workload: Workload) -> Manifest:
    """Build the template of a workload's pods, with the user's part merged in.

    Raises: ValueError when the user's part cannot be merged.
    """
    template: Manifest = _base(parent, defaults, workload)
    common = _own_containers(parent.run.spec.pods.template, workload.role)
    for place, patch in (("spec.pods.template", common), (workload.place, workload.template)):
        try:
            template = merge_template(template, patch)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if problems := "; ".join(_problems(patch, template, workload)):
            raise ValueError(f"{place}: {problems}")
    for container in template["spec"]["containers"]:
        if not _IMAGE.fullmatch(container["image"]):
            place = f"{workload.place.removesuffix('.template')}: container '{container['name']}'"
            why = "is not an image; write its path in lower case, and one tag or digest"
            raise ValueError(f"{place}: {container['image']!r} {why}")
        if container["name"] == workload.role.value:
            container["resources"] = _resources(parent, defaults, workload, container)
    metadata = template.setdefault("metadata", {})
    own_labels, own_annotations = queue_metadata(parent, workload.group)
    own_labels |= labels(parent.name, workload.role, workload.group)
    metadata["labels"] = {**metadata.get("labels", {}), **own_labels}
    metadata["annotations"] = {**metadata.get("annotations", {}), **own_annotations}
    # Processes read the run file and the keys when they start, so another one needs another pod.
    content = {
        "template": template,
        "run_file": parent.run_file,
        "credential": parent.credential_uid,
    }
    annotations = {**metadata.get("annotations", {}), TEMPLATE_HASH_ANNOTATION: digest(content)}
    return {**template, "metadata": {**metadata, "annotations": annotations}}


def moving_images(children: Iterable[Child]) -> Iterator[str]:
    """Yield the images that may be others tomorrow, in sentences with the fix."""
    templates = (each.manifest.get("spec", {}).get("template") for each in children)
    containers = [each for it in templates if it is not None for each in it["spec"]["containers"]]
    always = {each["image"] for each in containers if each.get("imagePullPolicy") == "Always"}
    for image in sorted({each["image"] for each in containers} - always):
        tag = image.rpartition("/")[2].partition(":")[2]
        if "@" not in image and tag in {"", "latest"}:
            yield (
                f"Nodes may run different versions of image '{image}': name a version, or set"
                " `imagePullPolicy: Always` in the template."
            )


def _own_containers(template: Mapping[str, Any], role: Role) -> Mapping[str, Any]:
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(containers, list):
        return template  # `merge_template` refuses it, or it names no container
    others = set(Role) - {role}
    own = [
        each
        for each in containers
        if not (isinstance(each, Mapping) and each.get("name") in others)
    ]
    return {**template, "spec": {**spec, "containers": own}}


def _problems(
    patch: Mapping[str, Any], merged: Mapping[str, Any], workload: Workload
) -> Iterator[str]:
    """Yield what a patch makes wrong that the API server would take or tell badly, with the fix."""
    spec = patch.get("spec") or {}
    field, least_s = "terminationGracePeriodSeconds", workload.drain_s + GRACE_MARGIN_S
    grace_s = merged["spec"].get(field, 30)  # Kubernetes' own default
    if field in spec and isinstance(grace_s, int) and grace_s < least_s:
        yield (
            f"`spec.{field}` is {grace_s} s; leave it out, or set"
            f" `drainSeconds` to {GRACE_MARGIN_S} s less: the pod would be killed while it saves"
        )
    for kind in ("containers", "initContainers"):
        images = {each["name"]: each.get("image") for each in merged["spec"].get(kind) or ()}
        for container in spec.get(kind) or ():
            path, image = f"spec.{kind}[{container['name']}]", images[container["name"]]
            yield from quantity_problems(container.get("resources") or {}, f"{path}.resources")
            if not image:
                yield f"`{path}` has no `image`; `{workload.role}` is the run's own container"
            for variable in container.get("env") or ():
                value = variable.get("value")
                if not isinstance(value, str | None):
                    yield f"`{path}.env[{variable['name']}].value` is {value}; write it in quotes"


def _resources(
    parent: Parent, defaults: OperatorDefaults, workload: Workload, container: Manifest
) -> Manifest:
    given, name = container.get("resources") or {}, _gpu_name(parent, defaults)
    if workload.gpus_by_default and not asks_for_accelerators(given):
        limits = {**given.get("limits", {}), name: workload.gpus_by_default}
        given = {**given, "limits": limits}
    amount = str(given.get("limits", {}).get(name, 0))
    gpus = int(amount) if amount.isdecimal() else 0
    return with_defaults(given, gpus=gpus, needs=workload.needs)


def _gpu_name(parent: Parent, defaults: OperatorDefaults) -> str:
    return parent.run.spec.pods.gpu_resource_name or defaults.gpu_resource_name


def _base(parent: Parent, defaults: OperatorDefaults, workload: Workload) -> Manifest:
    pods = parent.run.spec.pods
    spec: Manifest = {
        "serviceAccountName": account_name(parent.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": workload.drain_s + GRACE_MARGIN_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(parent, defaults, workload)],
        "volumes": [
            {"name": "config", "configMap": {"name": config_name(parent.name)}},
            {"name": "scratch", "emptyDir": _scratch(workload)},
            *_certificates(parent, workload.role),
            *_model_cache(parent),
            *workload.volumes,
            *_shared_memory(workload),
        ],
    }
    pull_secrets = pods.image_pull_secrets or defaults.image_pull_secrets
    if pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in pull_secrets]
    if workload.affinity:
        spec["affinity"] = workload.affinity
    annotations = {}
    if defaults.scrape_annotations:  # by which a Prometheus without its operator finds a pod
        annotations = {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(workload.metrics_port),
            "prometheus.io/path": "/metrics",
        }
    return {"metadata": {"labels": {}, "annotations": annotations}, "spec": spec}


def _shared_memory(workload: Workload) -> list[Manifest]:
    """Return the volume for /dev/shm, of which a container has only 64 MiB otherwise."""
    if not workload.shares_memory:
        return []
    needs = workload.needs
    limit = {} if needs is None else {"sizeLimit": gibibytes(needs.shared)}
    return [{"name": "shared-memory", "emptyDir": {"medium": "Memory", **limit}}]


def _scratch(workload: Workload) -> Manifest:
    """Return the folder for temporary files; its limit is twice what the container asks for."""
    needs = workload.needs
    if needs is None or not needs.download:
        return {}
    return {"sizeLimit": gibibytes(2 * (needs.download + DISK_BYTES))}


def _model_cache(parent: Parent) -> list[Manifest]:
    cache = parent.run.spec.model.cache
    if cache is None:
        return []
    return [{"name": "model-cache", "persistentVolumeClaim": {"claimName": cache.claim_name}}]


def _container(parent: Parent, defaults: OperatorDefaults, workload: Workload) -> Manifest:
    secret = workload.environment_secret
    gpus = {_gpu_name(parent, defaults): workload.gpus} if workload.gpus else {}
    return {
        "name": workload.role.value,
        "image": workload.image,
        "command": list(workload.command),
        "env": [*_environment(parent, defaults, workload), *workload.variables],
        **({} if secret is None else {"envFrom": [{"secretRef": {"name": secret}}]}),
        **_serving(workload),
        "resources": {"requests": {}, "limits": gpus},
        # So the last lines of a crashed process reach the run's conditions.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_PATH, "readOnly": True},
            {"name": "scratch", "mountPath": SCRATCH_PATH},
            *(
                {"name": each["name"], "mountPath": TLS_PATH, "readOnly": True}
                for each in _certificates(parent, workload.role)
            ),
            *({"name": each["name"], "mountPath": CACHE_PATH} for each in _model_cache(parent)),
            *workload.mounts,
            *(
                {"name": each["name"], "mountPath": "/dev/shm"}  # noqa: S108 - tmpfs of its own
                for each in _shared_memory(workload)
            ),
        ],
    }


def _serving(workload: Workload) -> Manifest:
    port = workload.health_port
    return {
        "ports": [
            {"name": "grpc", "containerPort": workload.port},
            {"name": "metrics", "containerPort": workload.metrics_port},
            {"name": "health", "containerPort": port},
            *workload.more_ports,
        ],
        "startupProbe": _probe(port, failures=_STARTUP_PROBES, period_s=_STARTUP_PERIOD_S),
        "readinessProbe": _probe(port, failures=1),
        "livenessProbe": _probe(port, failures=_LIVENESS_FAILURES),
    }


def _environment(parent: Parent, defaults: OperatorDefaults, workload: Workload) -> list[Manifest]:
    threads = workload.threads
    own = [] if threads is None else [{"name": "OMP_NUM_THREADS", "value": str(threads)}]
    return [
        # The root file system is read-only, and libraries cache under the home directory.
        {"name": "HOME", "value": SCRATCH_PATH},
        {"name": POD_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {
            "name": NAMESPACE_VARIABLE,
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}},
        },
        # The kubelet's file; a log that ends with torchrun's lines names no cause.
        {"name": END_VARIABLE, "value": "/dev/termination-log"},
        *(
            {"name": name, "value": value}
            for name, value in {**SERVICE_ENVIRONMENT, **defaults.pod_environment}.items()
        ),
        *_keys(parent, workload.role),
        *_hub(parent),
        *own,
    ]


def _hub(parent: Parent) -> list[Manifest]:
    pods, variables = parent.run.spec.pods, list[Manifest]()
    if pods.token_secret_name is not None:
        reference = {"name": pods.token_secret_name, "key": "token"}
        variables += [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}]
    if parent.run.spec.model.cache is not None:
        values = {
            "HF_HOME": f"{CACHE_PATH}/huggingface",
            CACHE_VARIABLE: f"{CACHE_PATH}/models",
            "HF_MODULES_CACHE": f"{SCRATCH_PATH}/modules",  # pods may differ in their code
        }
        variables += [{"name": name, "value": value} for name, value in values.items()]
    return variables


def _keys(parent: Parent, role: Role) -> list[Manifest]:
    secret = parent.run.spec.pods.keys_secret_name or credential_name(parent.name)
    roles = LEARNER_ROLES if role is Role.LEARNER else WORKER_ROLES
    return [
        {"name": each.variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": each.value}}}
        for each in roles
    ]


def transport_arguments(parent: Parent, health: str) -> list[str]:
    """Return the arguments that say how a process serves and where it is probed."""
    is_plain = parent.run.spec.pods.transport is Transport.PLAIN_TEXT
    return ["--plain-text" if is_plain else f"--tls={TLS_PATH}", f"--health-listen={health}"]


def downloads_model(spec: VCPORunSpec) -> bool:
    """Whether a pod downloads the model to its own disk."""
    is_mounted = spec.model.name.startswith("/")
    return not is_mounted and spec.model.cache is None


def near(pods: Mapping[str, str], topology: str) -> Manifest:
    """Return the wish, not the condition, to be where other pods with these labels are.

    topology: Label of nodes; those with the same value are one place.
    """
    term = {"labelSelector": {"matchLabels": dict(pods)}, "topologyKey": topology}
    wish = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}


def _certificates(parent: Parent, role: Role) -> list[Manifest]:
    """Return the volume with a pod's own certificate; none for plain text.

    The private key of the run's authority stays in the Secret.
    """
    pods = parent.run.spec.pods
    if pods.transport is Transport.PLAIN_TEXT:
        return []
    stem = role.value if pods.tls_secret_name is None else "tls"
    files = {"ca.crt": "ca.crt", f"{stem}.crt": "tls.crt", f"{stem}.key": "tls.key"}
    secret = {
        "secretName": pods.tls_secret_name or certificates_name(parent.name),
        "items": [{"key": key, "path": path} for key, path in files.items()],
        "defaultMode": 0o440,
    }
    return [{"name": "certificates", "secret": secret}]


def _probe(port: int, *, failures: int, period_s: int = _PROBE_PERIOD_S) -> Manifest:
    return {
        "grpc": {"port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
_SIZE_ANNOTATION = "kueue.x-k8s.io/pod-group-total-count"
_SERVING_ANNOTATION = "kueue.x-k8s.io/pod-group-serving"
"""`true`: pods are replaced, and the group does not end with them."""


def queue_labels(parent: Parent, group: RolloutGroup) -> dict[str, str]:
    """Return the labels of a group's Deployment, if it is a workload of its own."""
    queue = parent.run.spec.pods.queue_name
    return {} if queue is None or _is_fixed(group) else {QUEUE_LABEL: queue}


def queue_metadata(parent: Parent, group: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return Kueue's labels and annotations of the pods of a group; None: of the learner.

    ```
    unit             the learner's pods, and those of each group of a fixed size
    of their own     groups that may grow (`maxReplicas` above `minReplicas`): their Deployments
    ```
    Kueue admits a unit, a group of pods, only whole, and deletes pods beyond its size. So a group
    that may grow cannot be in it: a run that needs a number of workers and wants more has two
    groups. The size is part of the group's name: with another size it is another group.
    Source: https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/
    """
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
