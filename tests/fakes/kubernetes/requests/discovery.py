"""Discovery: versions, groups and resources."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tests.fakes.kubernetes.errors import JsonObject, no_such_path
from tests.fakes.kubernetes.objects.resources import CORE_VERBS, Catalogue, Resource

VERSION = {
    "major": "1",
    "minor": "34",
    "gitVersion": "v1.34.0+fake",
    "gitCommit": "0" * 40,
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "python",
    "platform": "linux/amd64",
}


def document(catalogue: Catalogue, path: str) -> JsonObject:
    """The document at a path that names no object.

    Raises:
        ApiError: 404.
    """
    parts = [part for part in path.split("/") if part]
    match parts:
        case ["version"]:
            return dict(VERSION)
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            groups = [_group(name, rs) for name, rs in _by_group(catalogue).items() if name]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["api", version]:
            return _resource_list(catalogue, "", version)
        case ["apis", group]:
            if group in _by_group(catalogue):
                return {"apiVersion": "v1", **_group(group, _by_group(catalogue)[group])}
        case ["apis", group, version]:
            return _resource_list(catalogue, group, version)
    raise no_such_path()


def _by_group(resources: Iterable[Resource]) -> dict[str, list[Resource]]:
    groups: dict[str, list[Resource]] = defaultdict(list)
    for resource in resources:
        groups[resource.group].append(resource)
    return groups


def _group(name: str, resources: list[Resource]) -> JsonObject:
    versions = sorted({resource.version for resource in resources}, key=_maturity)
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {
        "kind": "APIGroup",
        "name": name,
        "versions": listed,
        "preferredVersion": listed[0],
    }


def _maturity(version: str) -> tuple[int, str]:
    return (2 if "alpha" in version else 1 if "beta" in version else 0), version


def _resource_list(catalogue: Catalogue, group: str, version: str) -> JsonObject:
    resources = [r for r in catalogue if (r.group, r.version) == (group, version)]
    if not resources:
        raise no_such_path()
    listed: list[JsonObject] = []
    for resource in resources:
        listed.append(_entry(resource, resource.plural, CORE_VERBS, resource.kind))
        for subresource in resource.subresources:
            name = f"{resource.plural}/{subresource}"
            kind = _subresource_kind(resource, subresource)
            listed.append(_entry(resource, name, _subresource_verbs(subresource), kind))
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": resources[0].api_version,
        "resources": listed,
    }


def _entry(resource: Resource, name: str, verbs: Iterable[str], kind: str) -> JsonObject:
    entry: JsonObject = {
        "name": name,
        "singularName": "" if "/" in name else resource.singular,
        "namespaced": resource.namespaced,
        "kind": kind,
        "verbs": list(verbs),
    }
    if "/" not in name:
        entry |= {"shortNames": list(resource.short_names)} if resource.short_names else {}
        entry |= {"categories": list(resource.categories)} if resource.categories else {}
    return entry


def _subresource_kind(resource: Resource, subresource: str) -> str:
    kinds = {"binding": "Binding", "token": "TokenRequest"}
    return kinds.get(subresource, resource.kind)


def _subresource_verbs(subresource: str) -> tuple[str, ...]:
    return ("create",) if subresource in ("binding", "token") else ("get", "patch", "update")
