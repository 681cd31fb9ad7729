"""Discovery, as kopf asks for it: versions, groups and resources."""

from collections.abc import Iterable

from tests.fakes.kubernetes.errors import JsonObject, no_such_path
from tests.fakes.kubernetes.objects.resources import CORE_VERBS, Catalogue, Resource


def document(catalogue: Catalogue, path: str) -> JsonObject:
    """The document at a path that names no object.

    Raises:
        ApiError: 404.
    """
    match [part for part in path.split("/") if part]:
        case ["version"]:
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.0+fake"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups(catalogue)}
        case ["apis", group]:
            found = [each for each in _groups(catalogue) if each["name"] == group]
            if found:
                return {"apiVersion": "v1", **found[0]}
        case ["api", version]:
            return _resource_list(catalogue, "", version)
        case ["apis", group, version]:
            return _resource_list(catalogue, group, version)
    raise no_such_path()


def _groups(catalogue: Iterable[Resource]) -> list[JsonObject]:
    """Every group but the core; a fake group has one version."""
    versions = {each.group: each.version for each in catalogue if each.group}
    listed = {
        name: {"groupVersion": f"{name}/{version}", "version": version}
        for name, version in versions.items()
    }
    return [
        {"kind": "APIGroup", "name": name, "versions": [each], "preferredVersion": each}
        for name, each in listed.items()
    ]


def _resource_list(catalogue: Catalogue, group: str, version: str) -> JsonObject:
    resources = [each for each in catalogue if (each.group, each.version) == (group, version)]
    if not resources:
        raise no_such_path()
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": resources[0].api_version,
        "resources": [
            _entry(resource, name)
            for resource in resources
            for name in ("", *resource.subresources)
        ],
    }


def _entry(resource: Resource, subresource: str) -> JsonObject:
    return {
        "name": f"{resource.plural}/{subresource}" if subresource else resource.plural,
        "singularName": "" if subresource else resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": ["get", "patch", "update"] if subresource else list(CORE_VERBS),
    }
