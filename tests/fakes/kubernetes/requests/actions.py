"""Bindings and evictions: requests that name a pod, and place it or take it away."""

from dataclasses import replace
from typing import Any

from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.errors import JsonObject, no_such_path
from tests.fakes.kubernetes.patching.apply import MERGE_PATCH
from tests.fakes.kubernetes.requests.targets import DeleteOptions, Target, WriteOptions

_CONTROL_PLANE = WriteOptions(manager="kube-apiserver")
_CONDITIONS = {
    "binding": {"type": "PodScheduled", "status": "True"},
    "eviction": {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
    },
}


def act(api: Api, target: Target, body: Any) -> JsonObject:
    """Carry out a POST on a subresource; the node of a binding need not exist.

    Raises:
        ApiError: 404 for a missing object or a subresource that takes no POST.
    """
    pod = replace(target, subresource="")
    conditions = (api.get(pod).get("status") or {}).get("conditions") or ()
    if target.subresource not in _CONDITIONS:
        raise no_such_path()
    if target.subresource == "binding":
        api.schedule(pod, body["target"]["name"])
    condition = {**_CONDITIONS[target.subresource], "lastTransitionTime": api.now()}
    patch = {"status": {"conditions": [*conditions, condition]}}
    api.patch(replace(pod, subresource="status"), MERGE_PATCH, patch, _CONTROL_PLANE)
    if target.subresource == "eviction":
        api.delete(pod, DeleteOptions())
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
