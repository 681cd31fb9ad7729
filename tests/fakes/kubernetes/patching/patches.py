"""The three patches that change what a client names: JSON patch, merge patch, strategic merge.

All are pure: they answer a new document and leave the old one as it was.
Sources: RFC 6902, RFC 7386,
https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
"""

from __future__ import annotations

import copy
from typing import Any

from tests.fakes.kubernetes.errors import ApiError, JsonObject, bad_request, unsupported_media_type
from tests.fakes.kubernetes.objects.resources import Resource
from tests.fakes.kubernetes.patching.list_types import strategic_key

APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
PATCH_TYPES = (APPLY, JSON_PATCH, MERGE_PATCH, STRATEGIC_MERGE)
_DIRECTIVES = ("$patch", "$retainKeys")


def apply_patch(resource: Resource, shown: JsonObject, content_type: str, patch: Any) -> JsonObject:
    """What a patch of one of the three types makes of an object.

    Raises:
        ApiError: 400 or 422 for an impossible patch, 415 for one that the resource does not take.
    """
    if content_type == STRATEGIC_MERGE and resource.custom:
        raise unsupported_media_type(content_type, (APPLY, JSON_PATCH, MERGE_PATCH))
    if content_type == JSON_PATCH and isinstance(patch, list):
        return json_patch(shown, patch)
    if content_type == JSON_PATCH or not isinstance(patch, dict):
        raise bad_request(f"the body of a {content_type} is not a {type(patch).__name__}")
    merge = strategic_merge if content_type == STRATEGIC_MERGE else merge_patch
    result: JsonObject = merge(shown, patch)
    return result


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: objects merge, null removes, everything else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def json_patch(target: JsonObject, operations: list[JsonObject]) -> JsonObject:
    """RFC 6902: operations in order, all or none.

    Raises:
        ApiError: 422 when a `test` does not hold or a path is missing.
    """
    document: Any = copy.deepcopy(target)
    for operation in operations:
        try:
            document = _operate(document, operation)
        except (KeyError, IndexError, ValueError) as missing:
            raise ApiError(
                422,
                "Invalid",
                f"the server rejected our request due to an error in our request: "
                f"{operation.get('op')} {operation.get('path')}: {missing}",
            ) from missing
    patched: JsonObject = document
    return patched


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise ValueError(f"pointer {text!r} must start with '/'")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _step(node: Any, part: str) -> Any:
    return node[int(part)] if isinstance(node, list) else node[part]


def _lookup(document: Any, path: list[str]) -> Any:
    for part in path:
        document = _step(document, part)
    return document


def _operate(document: Any, operation: JsonObject) -> Any:
    path = _pointer(operation["path"])
    match operation["op"]:
        case "test":
            if _lookup(document, path) != operation.get("value"):
                raise ValueError("testing value failed")
        case "add":
            return _add(document, path, copy.deepcopy(operation["value"]))
        case "replace":
            _lookup(document, path)
            return _add(_remove(document, path), path, copy.deepcopy(operation["value"]))
        case "remove":
            return _remove(document, path)
        case "copy":
            source = _lookup(document, _pointer(operation["from"]))
            return _add(document, path, copy.deepcopy(source))
        case "move":
            origin = _pointer(operation["from"])
            value = _lookup(document, origin)
            return _add(_remove(document, origin), path, value)
        case other:
            raise ValueError(f"op {other!r} is not one of RFC 6902")
    return document


def _add(document: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    parent, last = _lookup(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        parent.insert(len(parent) if last == "-" else int(last), value)
    else:
        parent[last] = value
    return document


def _remove(document: Any, path: list[str]) -> Any:
    if not path:
        return None
    parent, last = _lookup(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        del parent[int(last)]
    else:
        del parent[last]
    return document


def strategic_merge(target: Any, patch: Any, fields: tuple[str, ...] = ()) -> Any:
    """Merge patch that knows the merge keys of built-in lists.

    fields: names of the fields above, which decide the merge key.
    Raises:
        ApiError: 400 when an item of a keyed list lacks its key.
    """
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key not in _DIRECTIVES}
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key in _DIRECTIVES or key.startswith(("$setElementOrder/", "$deleteFromPrimitiveList/")):
            continue
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, list):
            merged[key] = _merge_lists(merged.get(key) or [], value, (*fields, key))
        else:
            merged[key] = strategic_merge(merged.get(key), value, (*fields, key))
    return _drop_named_elements(merged, patch)


def _drop_named_elements(merged: JsonObject, patch: JsonObject) -> JsonObject:
    """Carry out `$deleteFromPrimitiveList/<field>`."""
    for key, values in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            field = key.partition("/")[2]
            merged[field] = [item for item in merged.get(field) or [] if item not in values]
    return merged


def _merge_lists(current: list[Any], patch: list[Any], fields: tuple[str, ...]) -> list[Any]:
    if fields[-1] == "finalizers":
        return current + [item for item in patch if item not in current]
    key = strategic_key(fields)
    if key is None or {"$patch": "replace"} in patch:
        return [item for item in copy.deepcopy(patch) if item != {"$patch": "replace"}]
    merged = list(current)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise bad_request(f"{'.'.join(fields)}: item {item!r} needs its merge key {key!r}")
        place = next((i for i, old in enumerate(merged) if old.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            merged = [old for old in merged if old.get(key) != item[key]]
        elif place is None:
            merged.append(strategic_merge({}, item, fields))
        else:
            merged[place] = strategic_merge(merged[place], item, fields)
    return merged
