"""Apply configurations: the part of an object that one manager states."""

from typing import Any

from tests.fakes.kubernetes.errors import Cause, JsonObject, bad_request, invalid
from tests.fakes.kubernetes.requests.targets import Target, check_body

_STATUS_FIELDS = ("apiVersion", "kind", "metadata", "status")


def configuration(target: Target, body: Any, manager: str) -> JsonObject:
    """What a manager states about the target, less what this address may not set.

    Raises:
        ApiError: 400 when the body contradicts its address, 422 without a manager.
    """
    if not manager:
        message = "Required value: is required for apply patch"
        cause = Cause(field="fieldManager", message=message, reason="FieldValueRequired")
        raise invalid("PatchOptions", "meta.k8s.io", "", [cause])
    stated = check_body(target, _without_nulls(body))
    if "managedFields" in stated["metadata"]:
        raise bad_request("metadata.managedFields must be nil")
    if "status" not in target.resource.subresources:
        return stated
    if target.subresource == "status":
        return {key: value for key, value in stated.items() if key in _STATUS_FIELDS}
    return {key: value for key, value in stated.items() if key != "status"}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(child) for key, child in value.items() if child is not None}
