"""Requests that do not change the object they name: bindings and tokens."""

from __future__ import annotations

import hashlib
from typing import Any

from tests.fakes.kubernetes.access import User, service_account
from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.errors import JsonObject, no_such_path
from tests.fakes.kubernetes.patching.patches import MERGE_PATCH
from tests.fakes.kubernetes.requests.targets import Target, WriteOptions

_SCHEDULER = WriteOptions(manager="kube-scheduler")


def act(api: Api, target: Target, body: Any, tokens: dict[str, User]) -> JsonObject:
    """Carry out a POST on a subresource.

    Raises:
        ApiError: 404 for a missing object or a subresource that takes no POST.
    """
    api.get(Target(resource=target.resource, namespace=target.namespace, name=target.name))
    if target.subresource == "binding":
        return _bind(api, target, body["target"]["name"])
    if target.subresource == "token":
        return _issue(target, tokens)
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


def _issue(target: Target, tokens: dict[str, User]) -> JsonObject:
    """A token of a ServiceAccount; the same account always gets the same one."""
    user = service_account(target.namespace, target.name)
    token = hashlib.sha256(user.name.encode()).hexdigest()
    tokens[token] = user
    return {
        "kind": "TokenRequest",
        "apiVersion": "authentication.k8s.io/v1",
        "metadata": {"name": target.name, "namespace": target.namespace},
        "spec": {"audiences": [], "expirationSeconds": 3600},
        "status": {"token": token, "expirationTimestamp": "2100-01-01T00:00:00Z"},
    }
