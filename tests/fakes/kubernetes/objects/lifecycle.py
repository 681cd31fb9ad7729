"""The checks and defaults that an object passes between a request and the store.

Pure: takes the old object and the wanted one, answers the one to keep.
Source: https://github.com/kubernetes/kubernetes/tree/master/staging/src/k8s.io/apiserver/pkg/registry/rest
"""

import json
from collections.abc import Iterator

from tests.fakes.kubernetes.errors import Cause, JsonObject, conflict, invalid
from tests.fakes.kubernetes.objects.defaults import fill_in
from tests.fakes.kubernetes.objects.definitions import definition_causes
from tests.fakes.kubernetes.objects.resources import Resource
from tests.fakes.kubernetes.objects.validation import builtin_causes

_SERVER_FIELDS = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "managedFields",
    "namespace",
    "generateName",
)
_USER_FIELDS = (
    "name",
    "namespace",
    "generateName",
    "labels",
    "annotations",
    "finalizers",
    "ownerReferences",
)
_FIRST_STATUS: dict[str, JsonObject] = {
    "Deployment": {},
    "ReplicaSet": {"replicas": 0},
    "StatefulSet": {"replicas": 0, "availableReplicas": 0},
    "Pod": {"phase": "Pending", "qosClass": "BestEffort"},
    "Namespace": {"phase": "Active"},
    "Service": {"loadBalancer": {}},
    "PersistentVolumeClaim": {"phase": "Pending"},
}


def fresh(resource: Resource, body: JsonObject, identity: JsonObject, suffix: str) -> JsonObject:
    """A new object: the user's part of the metadata and no status of the user's.

    identity: the metadata that the server gives. suffix: what makes a generated name unlike
    the others.
    Raises:
        ApiError: 422 when it has no name.
    """
    metadata = {key: body["metadata"][key] for key in _USER_FIELDS if key in body["metadata"]}
    if not metadata.get("name") and metadata.get("generateName"):
        metadata["name"] = metadata["generateName"] + suffix
    if not metadata.get("name"):
        message = "Required value: name or generateName is required"
        cause = Cause(field="metadata.name", message=message, reason="FieldValueRequired")
        raise invalid(resource.kind, resource.group, "", [cause])
    created = {**body, "metadata": {**metadata, **identity}}
    if "status" in resource.subresources:
        created.pop("status", None)
        if resource.kind in _FIRST_STATUS and not resource.custom:
            created["status"] = _FIRST_STATUS[resource.kind]
    return created


def check_version(
    resource: Resource, old: JsonObject, new: JsonObject, *, required: bool = False
) -> None:
    """Refuse a change of another version, or of another object of the same name.

    required: whether the change must name the version it is based on.
    Raises:
        ApiError: 409, or 422 when a required version is absent.
    """
    metadata, current = new["metadata"], old["metadata"]
    name, version, uid = current["name"], metadata.get("resourceVersion"), metadata.get("uid")
    if uid and uid != current["uid"]:
        why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: "
        raise conflict(resource.qualified, name, why + current["uid"])
    if version and version != current["resourceVersion"]:
        why = "the object has been modified; please apply your changes to the latest version"
        raise conflict(resource.qualified, name, why)
    if required and not version and resource.custom:
        message = "Invalid value: 0x0: must be specified for an update"
        cause = Cause(field="metadata.resourceVersion", message=message)
        raise invalid(resource.kind, resource.group, name, [cause])


def keep_protected_fields(
    resource: Resource, old: JsonObject, new: JsonObject, subresource: str
) -> JsonObject:
    """new with what this way of changing may not touch as it was in old."""
    if subresource == "status":
        rest = {key: value for key, value in old.items() if key != "status"}
        return {**rest, "status": new["status"]} if "status" in new else rest
    kept = {field: old["metadata"][field] for field in _SERVER_FIELDS if field in old["metadata"]}
    wanted = {k: v for k, v in new["metadata"].items() if k not in _SERVER_FIELDS}
    version = {"resourceVersion": old["metadata"]["resourceVersion"]}
    body = {**new, "metadata": {**wanted, **kept, **version}}
    if "status" in resource.subresources:
        body = {key: value for key, value in body.items() if key != "status"}
        body |= {"status": old["status"]} if "status" in old else {}
    return body


def with_generation(resource: Resource, old: JsonObject, new: JsonObject) -> JsonObject:
    """new, its generation raised when it differs from old in what the user asks for."""
    if not resource.generation or _desired_fields(resource, old) == _desired_fields(resource, new):
        return new
    generation = old["metadata"]["generation"] + 1
    return {**new, "metadata": {**new["metadata"], "generation": generation}}


def _desired_fields(resource: Resource, body: JsonObject) -> JsonObject:
    ignored = {"metadata", "apiVersion"}
    ignored |= {"status"} if "status" in resource.subresources else set()
    return {key: value for key, value in body.items() if key not in ignored}


def complete(resource: Resource, body: JsonObject) -> JsonObject:
    """body pruned and with defaults: a copy that nothing else holds."""
    # Twice as fast as deepcopy on what is JSON anyway, and this is every write's first cost.
    body = json.loads(json.dumps(body))
    if resource.schema is None:
        fill_in(resource.kind, body)
        return body
    return resource.schema.apply_defaults(resource.schema.prune(body))


def refuse_invalid(resource: Resource, new: JsonObject, old: JsonObject | None) -> None:
    """Check every rule of the kind.

    Raises:
        ApiError: 422 with all causes.
    """
    causes = list(_causes(resource, new, old))
    if causes:
        raise invalid(resource.kind, resource.group, new["metadata"]["name"], causes)


def _causes(resource: Resource, new: JsonObject, old: JsonObject | None) -> Iterator[Cause]:
    if resource.schema is not None:
        yield from resource.schema.violations(new, old)
    elif resource.kind == "CustomResourceDefinition":
        yield from definition_causes(new)
    else:
        yield from builtin_causes(resource.kind, new, old)
