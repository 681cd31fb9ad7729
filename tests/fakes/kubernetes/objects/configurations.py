"""Apply configurations: the part of an object that one manager states."""

from __future__ import annotations

from typing import Any

from tests.fakes.kubernetes.errors import ApiError, Cause, JsonObject, bad_request, invalid
from tests.fakes.kubernetes.objects.declared_fields import undeclared
from tests.fakes.kubernetes.requests.targets import Target, check_body

_STATUS_FIELDS = ("apiVersion", "kind", "metadata", "status")


def configuration(target: Target, body: Any, manager: str) -> JsonObject:
    """What a manager states about the target, less what this address may not set.

    Raises:
        ApiError: 400 when the body contradicts its address, 422 without a manager, 500 when a
            built-in kind does not have a field.
    """
    if not manager:
        message = "Required value: is required for apply patch"
        cause = Cause(field="fieldManager", message=message, reason="FieldValueRequired")
        raise invalid("PatchOptions", "meta.k8s.io", "", [cause])
    stated = check_body(target, _without_nulls(body))
    if "managedFields" in stated["metadata"]:
        raise bad_request("metadata.managedFields must be nil")
    if not target.resource.custom:
        said = (body.get("metadata") or {}).get("namespace", "")
        _refuse_fields(target, stated, said)
    if "status" not in target.resource.subresources:
        return stated
    if target.subresource == "status":
        return {key: value for key, value in stated.items() if key in _STATUS_FIELDS}
    return {key: value for key, value in stated.items() if key != "status"}


def _refuse_fields(target: Target, stated: JsonObject, namespace: str) -> None:
    """A server cannot give a type to a field that it does not know, and says that it has failed.

    namespace: as the body says it.
    """
    unknown = list(undeclared(target.resource, stated))
    if unknown:
        kind = f"{target.resource.api_version}, Kind={target.resource.kind}"
        message = (
            f"failed to create typed patch object ({namespace}/{target.name}; {kind}):"
            f" {unknown[0]}: field not declared in schema"
        )
        raise ApiError(500, "", message)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(child) for key, child in value.items() if child is not None}
