"""CustomResourceDefinitions: what the API server refuses, and the status it gives them.

Source: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.fakes.kubernetes.errors import Cause, JsonObject
from tests.fakes.kubernetes.objects import cel_rules

CLEANUP_FINALIZER = "customresourcecleanup.apiextensions.k8s.io"
_FORBIDDEN = ("$ref", "definitions", "dependencies", "deprecated", "discriminator", "id", "xml")


def definition_causes(body: JsonObject) -> Iterator[Cause]:
    """Mistakes in a definition: names, versions, and schemas that are not structural."""
    spec = body["spec"]
    expected = f"{spec['names']['plural']}.{spec['group']}"
    if body["metadata"]["name"] != expected:
        message = f'Invalid value: "{body["metadata"]["name"]}": must be "{expected}"'
        yield Cause(field="metadata.name", message=message)
    if sum(bool(version.get("storage")) for version in spec["versions"]) != 1:
        message = "Invalid value: must have exactly one version marked as storage version"
        yield Cause(field="spec.versions", message=message)
    for index, version in enumerate(spec["versions"]):
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        place = f"spec.versions[{index}].schema.openAPIV3Schema"
        if schema is None:
            yield Cause(field=place, message="Required value", reason="FieldValueRequired")
        else:
            yield from _structural_causes(schema, place)
            yield from cel_rules.unreadable(schema, place)
            yield from _default_causes(schema, place)


def _structural_causes(schema: JsonObject, place: str) -> Iterator[Cause]:
    """Every node has a type, uses no forbidden word, and mixes no fields with a free map."""
    free = schema.get("x-kubernetes-int-or-string") or schema.get(
        "x-kubernetes-preserve-unknown-fields"
    )
    if "type" not in schema and not free:
        message = "Required value: must not be empty for specified object fields"
        yield Cause(field=f"{place}.type", message=message, reason="FieldValueRequired")
    for word in _FORBIDDEN:
        if word in schema:
            yield Cause(field=f"{place}.{word}", message="Forbidden: must not be set")
    if schema.get("uniqueItems"):
        yield Cause(field=f"{place}.uniqueItems", message="Forbidden: set `list-type` instead")
    if schema.get("properties") and schema.get("additionalProperties"):
        message = "Forbidden: additionalProperties and properties are mutual exclusive"
        yield Cause(field=f"{place}.additionalProperties", message=message)
    for child, path in _children(schema, place):
        yield from _structural_causes(child, path)


def _default_causes(schema: JsonObject, place: str) -> Iterator[Cause]:
    """Rules that a default breaks as it stands, before the defaults inside it are filled in."""
    if "default" in schema:
        yield from cel_rules.violations(
            schema, schema["default"], path=f"{place}.default", root=False
        )
    for child, path in _children(schema, place):
        yield from _default_causes(child, path)


def _children(schema: JsonObject, place: str) -> Iterator[tuple[JsonObject, str]]:
    """Nodes below; the branches of logical words repeat no types, so they are left out."""
    for field, child in (schema.get("properties") or {}).items():
        yield child, f"{place}.properties[{field}]"
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield schema[key], f"{place}.{key}"


def established_status(body: JsonObject, time: str) -> JsonObject:
    """The status of a definition that is served."""
    spec = body["spec"]
    names = {"listKind": f"{spec['names']['kind']}List", **spec["names"]}
    stored = next(version["name"] for version in spec["versions"] if version.get("storage"))
    before = (body.get("status") or {}).get("storedVersions") or []
    conditions = [
        {
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": message,
            "lastTransitionTime": time,
        }
        for kind, reason, message in (
            ("NamesAccepted", "NoConflicts", "no conflicts found"),
            ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        )
    ]
    versions = [*before, *([] if stored in before else [stored])]
    return {"conditions": conditions, "acceptedNames": names, "storedVersions": versions}
