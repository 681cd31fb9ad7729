"""CustomResourceDefinitions: what the API server refuses, and the status it gives them.

Source: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
"""

from collections.abc import Iterator

from tests.fakes.kubernetes.errors import Cause, JsonObject
from tests.fakes.kubernetes.objects import cel_rules

CLEANUP_FINALIZER = "customresourcecleanup.apiextensions.k8s.io"


def definition_causes(body: JsonObject) -> Iterator[Cause]:
    """Rules that are not CEL, and defaults that break a rule; kubernetes_validate sees the rest."""
    for index, version in enumerate(body["spec"]["versions"]):
        schema = version["schema"]["openAPIV3Schema"]
        place = f"spec.versions[{index}].schema.openAPIV3Schema"
        yield from cel_rules.unreadable(schema, place)
        yield from _default_causes(schema, place)


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
