"""StatefulSets: pods with ordinals.

Departures: every set is Parallel and OnDelete, as the operator's are; no ControllerRevision
objects, no claims, no minReadySeconds.
Source: kubernetes/pkg/controller/statefulset (`stateful_set_control.go`).
"""

from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.controllers.garbage import change, delete
from tests.fakes.kubernetes.controllers.pods import (
    controlled_objects,
    count_ready,
    create_pod,
    template_hash,
)
from tests.fakes.kubernetes.errors import JsonObject
from tests.fakes.kubernetes.objects.deletion import PODS

STATEFUL_SETS = ("apps", "statefulsets")
REVISION_LABEL = "controller-revision-hash"


def ordinal(pod: JsonObject) -> int:
    """The number at the end of a pod's name."""
    return int(pod["metadata"]["name"].rpartition("-")[2])


def reconcile(api: Api, stateful_set: JsonObject) -> None:
    """Create what is missing, replace what has finished, delete what is too much; the status."""
    if stateful_set["metadata"].get("deletionTimestamp"):
        return
    revision = _revision(stateful_set)
    pods = {ordinal(pod): pod for pod in controlled_objects(api, stateful_set, PODS)}
    wanted = stateful_set["spec"]["replicas"]
    for number in range(wanted):
        if number not in pods:
            _create(api, stateful_set, number, revision)
        elif pods[number]["status"]["phase"] in ("Succeeded", "Failed"):
            delete(api, PODS, pods[number])
    for number in pods:
        if number >= wanted:
            delete(api, PODS, pods[number])
    _report(api, stateful_set, revision)


def _revision(stateful_set: JsonObject) -> str:
    return f"{stateful_set['metadata']['name']}-{template_hash(stateful_set['spec']['template'])}"


def _create(api: Api, stateful_set: JsonObject, number: int, revision: str) -> None:
    name = f"{stateful_set['metadata']['name']}-{number}"
    labels = {
        "statefulset.kubernetes.io/pod-name": name,
        "apps.kubernetes.io/pod-index": str(number),
        REVISION_LABEL: revision,
    }
    spec = stateful_set["spec"]
    more: JsonObject = {"hostname": name, "subdomain": spec.get("serviceName", "")}
    create_pod(api, stateful_set, {"name": name}, labels, more)


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
