"""The `scale` subresource: a Scale is a window on one number of the object behind it.

A real server writes down who changed the number only if somebody owned it before: the window shows
no ledger then, and updates of an object without a ledger are not tracked.
"""

from __future__ import annotations

from typing import Any

from tests.fakes.kubernetes.errors import Cause, JsonObject, invalid
from tests.fakes.kubernetes.objects.resources import Resource
from tests.fakes.kubernetes.objects.selectors import selector_text

_BUILTIN_PATHS = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
}


def _paths(resource: Resource) -> JsonObject:
    return resource.scale or _BUILTIN_PATHS


def path_of(resource: Resource) -> str:
    """Where the number stands: `.spec.replicas`."""
    path: str = _paths(resource)["specReplicasPath"]
    return path


def _at(body: JsonObject, path: str) -> Any:
    found: Any = body
    for part in path.strip(".").split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _with(body: JsonObject, path: str, value: Any) -> JsonObject:
    first, _, rest = path.strip(".").partition(".")
    child = _with(body.get(first) or {}, rest, value) if rest else value
    return {**body, first: child}


def _selector(resource: Resource, body: JsonObject) -> str:
    if resource.scale is None:
        return selector_text(body["spec"]["selector"])
    path = resource.scale.get("labelSelectorPath")
    return str(_at(body, path) or "") if path else ""


def scale_of(resource: Resource, body: JsonObject) -> JsonObject:
    """The Scale of an object."""
    paths = _paths(resource)
    metadata = {
        key: body["metadata"][key]
        for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        if key in body["metadata"]
    }
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": {"replicas": _at(body, paths["specReplicasPath"]) or 0},
        "status": {
            "replicas": _at(body, paths["statusReplicasPath"]) or 0,
            "selector": _selector(resource, body),
        },
    }


def apply_scale(resource: Resource, body: JsonObject, scale: JsonObject) -> JsonObject:
    """The object with the number that a Scale asks for.

    Raises:
        ApiError: 422 when the number is negative or not a whole one.
    """
    replicas = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(replicas, int) or replicas < 0:
        message = f"Invalid value: {replicas!r}: must be an integer >= 0"
        cause = Cause(field="spec.replicas", message=message)
        raise invalid("Scale", "autoscaling", body["metadata"]["name"], [cause])
    return _with(body, _paths(resource)["specReplicasPath"], replicas)


def configuration_of(resource: Resource, scale: JsonObject) -> JsonObject:
    """The apply configuration of the object that an applied Scale stands for."""
    config: JsonObject = {"metadata": scale.get("metadata") or {}}
    config |= {"apiVersion": resource.api_version, "kind": resource.kind}
    return _with(config, _paths(resource)["specReplicasPath"], scale["spec"]["replicas"])
