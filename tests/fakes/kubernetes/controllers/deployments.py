"""Deployments and ReplicaSets, with the real roll-out arithmetic.

Departures: every strategy is RollingUpdate; no adoption of orphans, no minReadySeconds, no progress
deadline, no proportional scaling of several ReplicaSets at once.
Source: kubernetes/pkg/controller/deployment (`rolling.go`, `recreate.go`).
"""

import math
from dataclasses import dataclass

from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.controllers.garbage import change, delete
from tests.fakes.kubernetes.controllers.pods import (
    controlled_objects,
    controller_reference,
    count_ready,
    create_pod,
    is_active,
    template_hash,
    victims_first,
)
from tests.fakes.kubernetes.errors import JsonObject
from tests.fakes.kubernetes.objects.deletion import PODS
from tests.fakes.kubernetes.requests.targets import Target

DEPLOYMENTS = ("apps", "deployments")
REPLICA_SETS = ("apps", "replicasets")
HASH_LABEL = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How far a rolling update may go: pods above and below the wanted number."""

    surge: int
    unavailable: int


def bounds_of(deployment: JsonObject) -> Bounds:
    """The bounds of a deployment's strategy; a share is rounded up above and down below."""
    replicas = deployment["spec"]["replicas"]
    rolling = deployment["spec"]["strategy"].get("rollingUpdate") or {}
    surge = _resolve(rolling.get("maxSurge", 0), replicas, up=True)
    unavailable = _resolve(rolling.get("maxUnavailable", 0), replicas, up=False)
    return Bounds(surge=surge, unavailable=unavailable or int(surge == 0))


def _resolve(value: int | str, replicas: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    exact = int(value.rstrip("%")) * replicas / 100
    return math.ceil(exact) if up else math.floor(exact)


def reconcile_deployment(api: Api, deployment: JsonObject) -> None:
    """One step towards the wanted ReplicaSets, and the status."""
    if deployment["metadata"].get("deletionTimestamp"):
        return
    sets = controlled_objects(api, deployment, REPLICA_SETS)
    hashed = template_hash(deployment["spec"]["template"])
    current = next((s for s in sets if s["metadata"]["labels"].get(HASH_LABEL) == hashed), None)
    old = [s for s in sets if s is not current]
    if current is None:
        _create_replica_set(api, deployment, hashed, len(sets) + 1)
    else:
        _roll(api, deployment, current, old)
    _report(api, deployment, hashed)


def _create_replica_set(api: Api, deployment: JsonObject, hashed: str, revision: int) -> None:
    spec, metadata = deployment["spec"], deployment["metadata"]
    template = spec["template"]
    labels = {**template["metadata"]["labels"], HASH_LABEL: hashed}
    match_labels = {**(spec["selector"].get("matchLabels") or {}), HASH_LABEL: hashed}
    body: JsonObject = {
        "metadata": {
            "name": f"{metadata['name']}-{hashed}",
            "labels": labels,
            "annotations": {REVISION: str(revision)},
            "ownerReferences": [controller_reference(deployment)],
        },
        "spec": {
            "replicas": spec["replicas"] if revision == 1 else 0,
            "selector": {**spec["selector"], "matchLabels": match_labels},
            "template": {**template, "metadata": {**template["metadata"], "labels": labels}},
        },
    }
    resource = api.catalogue.by_key(*REPLICA_SETS)
    api.create(Target(resource=resource, namespace=metadata["namespace"]), body)
    change(api, DEPLOYMENTS, deployment, {"metadata": {"annotations": {REVISION: str(revision)}}})


def _roll(api: Api, deployment: JsonObject, current: JsonObject, old: list[JsonObject]) -> None:
    wanted, bounds = deployment["spec"]["replicas"], bounds_of(deployment)
    have = current["spec"]["replicas"]
    total = have + sum(s["spec"]["replicas"] for s in old)
    if have > wanted:
        _scale(api, current, wanted)
    elif have < wanted and total < wanted + bounds.surge:
        _scale(api, current, have + min(wanted + bounds.surge - total, wanted - have))
    waiting = have - current["status"].get("availableReplicas", 0)
    spare = total - (wanted - bounds.unavailable) - waiting
    for replica_set in sorted(old, key=lambda s: count_ready(controlled_objects(api, s, PODS))):
        less = min(max(spare, 0), replica_set["spec"]["replicas"])
        _scale(api, replica_set, replica_set["spec"]["replicas"] - less)
        spare -= less


def _scale(api: Api, replica_set: JsonObject, replicas: int) -> None:
    if replica_set["spec"]["replicas"] != replicas:
        change(api, REPLICA_SETS, replica_set, {"spec": {"replicas": replicas}})


def _report(api: Api, deployment: JsonObject, hashed: str) -> None:
    sets = controlled_objects(api, deployment, REPLICA_SETS)
    total = sum(s["status"].get("replicas", 0) for s in sets)
    ready = sum(s["status"].get("readyReplicas", 0) for s in sets)
    updated = sum(
        s["status"].get("replicas", 0)
        for s in sets
        if s["metadata"]["labels"].get(HASH_LABEL) == hashed
    )
    wanted = deployment["spec"]["replicas"]
    status = {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": total or None,
        "updatedReplicas": updated or None,
        "readyReplicas": ready or None,
        "availableReplicas": ready or None,
        "unavailableReplicas": max(wanted - ready, 0) or None,
    }
    change(api, DEPLOYMENTS, deployment, {"status": status}, "status")


def reconcile_replica_set(api: Api, replica_set: JsonObject) -> None:
    """Create or delete pods until their number is the wanted one, and report."""
    if replica_set["metadata"].get("deletionTimestamp"):
        return
    active = [pod for pod in controlled_objects(api, replica_set, PODS) if is_active(pod)]
    wanted = replica_set["spec"]["replicas"]
    for _ in range(wanted - len(active)):
        name = {"generateName": f"{replica_set['metadata']['name']}-"}
        create_pod(api, replica_set, name, {}, {})
    for pod in victims_first(active)[: max(len(active) - wanted, 0)]:
        delete(api, PODS, pod)
    active = [pod for pod in controlled_objects(api, replica_set, PODS) if is_active(pod)]
    ready = count_ready(active)
    status = {
        "replicas": len(active),
        "fullyLabeledReplicas": len(active) or None,
        "readyReplicas": ready or None,
        "availableReplicas": ready or None,
        "observedGeneration": replica_set["metadata"]["generation"],
    }
    change(api, REPLICA_SETS, replica_set, {"status": status}, "status")
