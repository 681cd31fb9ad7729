"""What the workload controllers share: pods made from templates, their states and hashes.

Pods are created Pending and stay so until somebody plays the kubelet through the API: bind
them to a node (`pods/binding`), report `status`, and delete terminating ones with no grace.
"""

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping

from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.errors import JsonObject
from tests.fakes.kubernetes.objects.deletion import PODS
from tests.fakes.kubernetes.requests.targets import Target
from tests.fakes.kubernetes.store import ResourceKey

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


def template_hash(template: JsonObject) -> str:
    """Ten letters that name a pod template."""
    text = json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def controller_reference(owner: JsonObject) -> JsonObject:
    """The reference that makes owner the controller of an object."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def controlled_objects(api: Api, owner: JsonObject, resource: ResourceKey) -> list[JsonObject]:
    """Objects of a resource that owner controls."""
    uid = owner["metadata"]["uid"]
    return [body for key, body in api.store.dependents(uid) if key == resource]


def create_pod(
    api: Api, owner: JsonObject, name: JsonObject, labels: Mapping[str, str], spec: JsonObject
) -> None:
    """Create a pod of owner's template.

    name: `name` or `generateName`. spec: more of the spec.
    """
    template = copy.deepcopy(owner["spec"]["template"])
    metadata = template.get("metadata") or {}
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    metadata |= {**name, "ownerReferences": [controller_reference(owner)]}
    body = {**template, "metadata": metadata, "spec": {**template["spec"], **spec}}
    target = Target(resource=api.catalogue.by_key(*PODS), namespace=owner["metadata"]["namespace"])
    api.create(target, body)


def is_active(pod: JsonObject) -> bool:
    """Whether a pod counts: neither finished nor on its way out."""
    finished = pod["status"]["phase"] in ("Succeeded", "Failed")
    return not finished and not pod["metadata"].get("deletionTimestamp")


def is_ready(pod: JsonObject) -> bool:
    """Whether the kubelet reported the pod as ready."""
    conditions = pod["status"].get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def count_ready(pods: Iterable[JsonObject]) -> int:
    """How many pods are ready."""
    return sum(is_ready(pod) for pod in pods)


def victims_first(pods: Iterable[JsonObject]) -> list[JsonObject]:
    """Pods in the order in which a ReplicaSet gives them up.

    Unscheduled before scheduled, not ready before ready, cheap before dear
    (`pod-deletion-cost`), young before old.
    Source: kubernetes/pkg/controller `ActivePodsWithRanks`.
    """
    by_age = sorted(pods, key=lambda pod: int(pod["metadata"]["resourceVersion"]), reverse=True)
    by_age.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
    return sorted(by_age, key=_worth)


def _worth(pod: JsonObject) -> tuple[bool, bool, bool, int]:
    annotations = pod["metadata"].get("annotations") or {}
    return (
        bool(pod["spec"].get("nodeName")),
        pod["status"]["phase"] == "Running",
        is_ready(pod),
        int(annotations.get(DELETION_COST, 0)),
    )
