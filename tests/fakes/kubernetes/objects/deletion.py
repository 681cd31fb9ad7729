"""Deletion: at once, or terminating until the last finalizer is gone.

Source: https://kubernetes.io/docs/concepts/architecture/garbage-collection/
"""

from datetime import datetime, timedelta

from tests.fakes.kubernetes.errors import JsonObject, conflict
from tests.fakes.kubernetes.objects.definitions import CLEANUP_FINALIZER
from tests.fakes.kubernetes.objects.resources import Resource
from tests.fakes.kubernetes.requests.targets import DeleteOptions, Target

NAMESPACES = ("", "namespaces")
DEFINITIONS = ("apiextensions.k8s.io", "customresourcedefinitions")
PODS = ("", "pods")


def timestamp(time: datetime) -> str:
    """A time as objects hold it: RFC 3339 in whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def check_preconditions(target: Target, old: JsonObject, options: DeleteOptions) -> None:
    """Refuse to delete another object than the client means.

    Raises:
        ApiError: 409.
    """
    found = old["metadata"]["uid"]
    if options.uid and options.uid != found:
        why = f"the UID in the precondition ({options.uid}) does not match ({found})"
        raise conflict(target.resource.qualified, target.name, why)


def after_delete(
    resource: Resource, old: JsonObject, options: DeleteOptions, now: datetime
) -> JsonObject | None:
    """What is left of old when it is deleted now: None when it goes at once."""
    metadata = old["metadata"]
    grace_s = _grace_s(resource, old, options)
    held_by = list(metadata.get("finalizers") or ())
    finalizers = held_by
    if resource.key == DEFINITIONS and CLEANUP_FINALIZER not in held_by:
        finalizers = [*held_by, CLEANUP_FINALIZER]
    if not (finalizers or grace_s or resource.key == NAMESPACES):
        return None
    terminating = metadata.get("deletionTimestamp")
    if terminating and finalizers == held_by and grace_s >= metadata["deletionGracePeriodSeconds"]:
        return old
    marked = {
        **metadata,
        "deletionTimestamp": terminating or timestamp(now + timedelta(seconds=grace_s)),
        "deletionGracePeriodSeconds": grace_s,
    }
    marked |= {"finalizers": finalizers} if finalizers else {}
    marked |= {"generation": metadata["generation"] + 1} if resource.generation else {}
    body = {**old, "metadata": marked}
    return {**body, "status": {"phase": "Terminating"}} if resource.key == NAMESPACES else body


def may_be_removed(resource: Resource, body: JsonObject) -> bool:
    """Whether a terminating object has nothing left that holds it."""
    metadata = body["metadata"]
    return (
        "deletionTimestamp" in metadata
        and not metadata.get("finalizers")
        and not metadata.get("deletionGracePeriodSeconds")
        and resource.key != NAMESPACES
    )


def _grace_s(resource: Resource, body: JsonObject, options: DeleteOptions) -> int:
    """Seconds a pod may take; nothing else waits, nor does a pod that runs nowhere."""
    phase = (body.get("status") or {}).get("phase")
    if resource.key != PODS or not body["spec"].get("nodeName"):
        return 0
    if phase in ("Succeeded", "Failed"):
        return 0
    asked: int = body["spec"]["terminationGracePeriodSeconds"]
    return asked if options.grace_s is None else options.grace_s
