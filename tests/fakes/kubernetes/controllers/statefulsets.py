"""StatefulSets: pods with ordinals, one after the other or all at once, and their claims.

Departures: no ControllerRevision objects, no minReadySeconds, claims are never deleted on scaling.
Source: kubernetes/pkg/controller/statefulset (`stateful_set_control.go`).
"""

from __future__ import annotations

from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.controllers.garbage import OPTIONS, change, delete
from tests.fakes.kubernetes.controllers.pods import (
    controlled_objects,
    controller_reference,
    count_ready,
    create_pod,
    is_ready,
    template_hash,
    warn,
)
from tests.fakes.kubernetes.errors import JsonObject
from tests.fakes.kubernetes.objects.deletion import PODS
from tests.fakes.kubernetes.requests.targets import Target

STATEFUL_SETS = ("apps", "statefulsets")
CLAIMS = ("", "persistentvolumeclaims")
REVISION_LABEL = "controller-revision-hash"


def ordinal(pod: JsonObject) -> int:
    """The number at the end of a pod's name."""
    return int(pod["metadata"]["name"].rpartition("-")[2])


def reconcile(api: Api, stateful_set: JsonObject) -> None:
    """One step towards the wanted pods, and the status."""
    if stateful_set["metadata"].get("deletionTimestamp"):
        return
    revision = _revision(stateful_set)
    pods = {ordinal(pod): pod for pod in controlled_objects(api, stateful_set, PODS)}
    parallel = stateful_set["spec"]["podManagementPolicy"] == "Parallel"
    steady = _fill_up(api, stateful_set, pods, revision, parallel=parallel)
    if steady or parallel:
        steady = _shrink(api, stateful_set, pods, parallel=parallel)
    if steady and stateful_set["spec"]["updateStrategy"]["type"] == "RollingUpdate":
        _roll(api, stateful_set, pods, revision)
    _report(api, stateful_set, revision)


def _revision(stateful_set: JsonObject) -> str:
    return f"{stateful_set['metadata']['name']}-{template_hash(stateful_set['spec']['template'])}"


def _fill_up(
    api: Api,
    stateful_set: JsonObject,
    pods: dict[int, JsonObject],
    revision: str,
    *,
    parallel: bool,
) -> bool:
    """Create what is missing and replace what has finished; whether all wanted pods are well."""
    steady = True
    for number in range(stateful_set["spec"]["replicas"]):
        pod = pods.get(number)
        if pod is None:
            _create(api, stateful_set, number, revision)
        elif pod["status"]["phase"] in ("Succeeded", "Failed"):
            delete(api, PODS, pod)
        if pod is None or not is_ready(pod) or pod["metadata"].get("deletionTimestamp"):
            steady = False
            if not parallel:
                return False
    return steady


def _create(api: Api, stateful_set: JsonObject, number: int, revision: str) -> None:
    name = f"{stateful_set['metadata']['name']}-{number}"
    labels = {
        "statefulset.kubernetes.io/pod-name": name,
        "apps.kubernetes.io/pod-index": str(number),
        REVISION_LABEL: revision,
    }
    spec = stateful_set["spec"]
    volumes = list(spec["template"]["spec"].get("volumes") or ())
    for claim in spec.get("volumeClaimTemplates") or ():
        volume = claim["metadata"]["name"]
        claimed = f"{volume}-{name}"
        _claim(api, stateful_set, claim, claimed)
        volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": claimed}})
    more: JsonObject = {"hostname": name, "subdomain": spec.get("serviceName", "")}
    more |= {"volumes": volumes} if volumes else {}
    refusal = create_pod(api, stateful_set, {"name": name}, labels, more)
    if refusal:
        where = f"create Pod {name} in StatefulSet {stateful_set['metadata']['name']}"
        warn(api, stateful_set, "FailedCreate", f"{where} failed error: {refusal}")


def _claim(api: Api, stateful_set: JsonObject, claim: JsonObject, name: str) -> None:
    namespace = stateful_set["metadata"]["namespace"]
    if api.store.get(CLAIMS, namespace, name) is not None:
        return
    retention = stateful_set["spec"]["persistentVolumeClaimRetentionPolicy"]
    metadata = {**claim["metadata"], "name": name}
    if retention["whenDeleted"] == "Delete":
        metadata["ownerReferences"] = [controller_reference(stateful_set)]
    target = Target(resource=api.catalogue.by_key(*CLAIMS), namespace=namespace)
    api.create(target, {"metadata": metadata, "spec": claim["spec"]}, OPTIONS)


def _shrink(
    api: Api, stateful_set: JsonObject, pods: dict[int, JsonObject], *, parallel: bool
) -> bool:
    """Delete pods beyond the wanted number, the last first; whether there were none."""
    beyond = sorted((n for n in pods if n >= stateful_set["spec"]["replicas"]), reverse=True)
    for number in beyond if parallel else beyond[:1]:
        delete(api, PODS, pods[number])
    return not beyond


def _roll(api: Api, stateful_set: JsonObject, pods: dict[int, JsonObject], revision: str) -> None:
    """Delete the last pod of another revision; its successor must be ready before the next."""
    partition = stateful_set["spec"]["updateStrategy"]["rollingUpdate"]["partition"]
    for number in sorted(pods, reverse=True):
        if number >= partition and not _is_current(pods[number], revision):
            delete(api, PODS, pods[number])
            return


def _is_current(pod: JsonObject, revision: str) -> bool:
    return bool((pod["metadata"].get("labels") or {}).get(REVISION_LABEL) == revision)


def _report(api: Api, stateful_set: JsonObject, revision: str) -> None:
    pods = controlled_objects(api, stateful_set, PODS)
    updated = sum(_is_current(pod, revision) for pod in pods)
    before = stateful_set["status"].get("currentRevision", revision)
    current = revision if updated == len(pods) else before
    ready = count_ready(pods)
    status = {
        "observedGeneration": stateful_set["metadata"]["generation"],
        "replicas": len(pods),
        "readyReplicas": ready or None,
        "availableReplicas": ready,
        "updatedReplicas": updated or None,
        "currentReplicas": sum(_is_current(pod, current) for pod in pods) or None,
        "currentRevision": current,
        "updateRevision": revision,
        "collisionCount": 0,
    }
    change(api, STATEFUL_SETS, stateful_set, {"status": status}, "status")
