"""Bindings: requests that name a pod and place it."""

from __future__ import annotations

from typing import Any

from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.errors import JsonObject, no_such_path
from tests.fakes.kubernetes.patching.patches import MERGE_PATCH
from tests.fakes.kubernetes.requests.targets import Target, WriteOptions

_SCHEDULER = WriteOptions(manager="kube-scheduler")


def act(api: Api, target: Target, body: Any) -> JsonObject:
    """Carry out a POST on a subresource.

    Raises:
        ApiError: 404 for a missing object or a subresource that takes no POST.
    """
    api.get(Target(resource=target.resource, namespace=target.namespace, name=target.name))
    if target.subresource == "binding":
        return _bind(api, target, body["target"]["name"])
    raise no_such_path()


def _bind(api: Api, target: Target, node: str) -> JsonObject:
    """Place a pod on a node, as the scheduler does; the node need not exist."""
    pod = Target(resource=target.resource, namespace=target.namespace, name=target.name)
    api.schedule(pod, node)
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": api.now()}
    status = Target(
        resource=target.resource,
        namespace=target.namespace,
        name=target.name,
        subresource="status",
    )
    api.patch(status, MERGE_PATCH, {"status": {"conditions": [condition]}}, _SCHEDULER)
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
