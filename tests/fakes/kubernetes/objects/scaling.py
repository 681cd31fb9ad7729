"""The `scale` subresource: a Scale is a window on `spec.replicas` of the workload behind it.

A real server writes down who changed the number only if somebody owned it before: the window shows
no ledger then, and updates of an object without a ledger are not tracked.
"""

from __future__ import annotations

from typing import Final

from tests.fakes.kubernetes.errors import Cause, JsonObject, invalid
from tests.fakes.kubernetes.objects.resources import Resource
from tests.fakes.kubernetes.objects.selectors import selector_text

PATH: Final = ".spec.replicas"
"""Where the number stands."""


def scale_of(body: JsonObject) -> JsonObject:
    """The Scale of a workload."""
    metadata = {
        key: body["metadata"][key]
        for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        if key in body["metadata"]
    }
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": {"replicas": body["spec"].get("replicas") or 0},
        "status": {
            "replicas": (body.get("status") or {}).get("replicas") or 0,
            "selector": selector_text(body["spec"]["selector"]),
        },
    }


def apply_scale(body: JsonObject, scale: JsonObject) -> JsonObject:
    """The workload with the number that a Scale asks for.

    Raises:
        ApiError: 422 when the number is negative or not a whole one.
    """
    replicas = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(replicas, int) or replicas < 0:
        message = f"Invalid value: {replicas!r}: must be an integer >= 0"
        cause = Cause(field="spec.replicas", message=message)
        raise invalid("Scale", "autoscaling", body["metadata"]["name"], [cause])
    return {**body, "spec": {**body["spec"], "replicas": replicas}}


def configuration_of(resource: Resource, scale: JsonObject) -> JsonObject:
    """The apply configuration of the workload that an applied Scale stands for."""
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": scale.get("metadata") or {},
        "spec": {"replicas": scale["spec"]["replicas"]},
    }
