"""The defaults that the API server sets in built-in objects, so that clients meet the same drift.

Only what a client can see in the kinds of this project. Every function changes its argument,
which is the server's own copy.
Source: https://github.com/kubernetes/kubernetes/tree/master/pkg/apis (each `defaults.go`)
"""

import base64
from collections.abc import Callable

from tests.fakes.kubernetes.errors import JsonObject

_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def fill_in(kind: str, body: JsonObject) -> None:
    """Defaults of a built-in kind; kinds without any are left alone."""
    if kind in _BY_KIND:
        _BY_KIND[kind](body.setdefault("spec", {}))
    elif kind == "Secret" and "stringData" in body:
        _encode_strings(body)


def _encode_strings(body: JsonObject) -> None:
    encoded = {k: base64.b64encode(v.encode()).decode() for k, v in body.pop("stringData").items()}
    body["data"] = {**(body.get("data") or {}), **encoded}


def _fill(target: JsonObject, **values: object) -> None:
    for key, value in values.items():
        target.setdefault(key, value)


def _deployment(spec: JsonObject) -> None:
    _fill(spec, replicas=1, revisionHistoryLimit=10, progressDeadlineSeconds=600)
    strategy = spec.setdefault("strategy", {})
    _fill(strategy, type="RollingUpdate")
    if strategy["type"] == "RollingUpdate":
        _fill(strategy.setdefault("rollingUpdate", {}), maxUnavailable="25%", maxSurge="25%")
    _template(spec)


def _replica_set(spec: JsonObject) -> None:
    _fill(spec, replicas=1)
    _template(spec)


def _stateful_set(spec: JsonObject) -> None:
    _fill(spec, replicas=1, revisionHistoryLimit=10, podManagementPolicy="OrderedReady")
    strategy = spec.setdefault("updateStrategy", {})
    _fill(strategy, type="RollingUpdate")
    if strategy["type"] == "RollingUpdate":
        _fill(strategy.setdefault("rollingUpdate", {}), partition=0)
    retention = spec.setdefault("persistentVolumeClaimRetentionPolicy", {})
    _fill(retention, whenDeleted="Retain", whenScaled="Retain")
    _template(spec)


def _template(spec: JsonObject) -> None:
    _pod(spec.setdefault("template", {}).setdefault("spec", {}))


def _pod(spec: JsonObject) -> None:
    _fill(
        spec,
        restartPolicy="Always",
        dnsPolicy="ClusterFirst",
        schedulerName="default-scheduler",
        terminationGracePeriodSeconds=30,
        securityContext={},
    )
    if spec.get("serviceAccountName"):
        _fill(spec, serviceAccount=spec["serviceAccountName"])
    for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        _container(container)
    for volume in spec.get("volumes") or ():
        _volume(volume)


def _container(container: JsonObject) -> None:
    image = container.get("image", "").rpartition("/")[2]
    latest = "@" not in image and (":" not in image or image.endswith(":latest"))
    _fill(
        container,
        imagePullPolicy="Always" if latest else "IfNotPresent",
        resources={},
        terminationMessagePath="/dev/termination-log",
        terminationMessagePolicy="File",
    )
    limits = container["resources"].get("limits") or {}
    if limits:
        container["resources"]["requests"] = {
            **limits,
            **container["resources"].get("requests", {}),
        }
    for port in container.get("ports") or ():
        _fill(port, protocol="TCP")
    for variable in container.get("env") or ():
        if "fieldRef" in (variable.get("valueFrom") or {}):
            _fill(variable["valueFrom"]["fieldRef"], apiVersion="v1")
    for name in _PROBES:
        if name in container:
            _probe(container[name])


def _probe(probe: JsonObject) -> None:
    _fill(probe, timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)
    if "httpGet" in probe:
        _fill(probe["httpGet"], path="/", scheme="HTTP")
    if "grpc" in probe:
        _fill(probe["grpc"], service="")


def _volume(volume: JsonObject) -> None:
    for source in ("configMap", "secret", "projected", "downwardAPI"):
        if source in volume:
            _fill(volume[source], defaultMode=0o644)
    if len(volume) == 1:
        volume["emptyDir"] = {}


def _service(spec: JsonObject) -> None:
    _fill(spec, type="ClusterIP", sessionAffinity="None")
    _fill(spec, internalTrafficPolicy="Cluster")
    for port in spec.get("ports") or ():
        _fill(port, protocol="TCP", targetPort=port["port"])


def _claim(spec: JsonObject) -> None:
    _fill(spec, volumeMode="Filesystem")


def _network_policy(spec: JsonObject) -> None:
    policies = ["Ingress", "Egress"] if spec.get("egress") else ["Ingress"]
    _fill(spec, podSelector={}, policyTypes=policies)


def _namespace(spec: JsonObject) -> None:
    _fill(spec, finalizers=["kubernetes"])


_BY_KIND: dict[str, Callable[[JsonObject], None]] = {
    "Deployment": _deployment,
    "ReplicaSet": _replica_set,
    "StatefulSet": _stateful_set,
    "Pod": _pod,
    "Service": _service,
    "PersistentVolumeClaim": _claim,
    "NetworkPolicy": _network_policy,
    "Namespace": _namespace,
}
