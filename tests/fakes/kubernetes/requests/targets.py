"""The object that a request addresses, and its options, parsed from path and query."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fakes.kubernetes.errors import JsonObject, bad_request, no_such_path
from tests.fakes.kubernetes.objects.resources import Catalogue, Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request is about. namespace: empty means all, or that there are none."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How to write."""

    manager: str
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOptions:
    """How to delete. grace_s: None means what the object asks for."""

    uid: str = ""
    grace_s: int | None = None


def write_options(query: Mapping[str, str], program: str) -> WriteOptions:
    """Options of a write. program: stands for a manager that the query does not name."""
    return WriteOptions(
        manager=query.get("fieldManager") or program, force=query.get("force") == "true"
    )


def delete_options(query: Mapping[str, str], body: JsonObject) -> DeleteOptions:
    """Options of a deletion, from its body or else from the query."""
    grace = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    return DeleteOptions(
        uid=(body.get("preconditions") or {}).get("uid", ""),
        grace_s=None if grace is None else int(grace),
    )


def target_of(catalogue: Catalogue, path: str) -> Target:
    """The target that a URL path names.

    Raises:
        ApiError: 404 when nothing is served there.
    """
    parts = [part for part in path.split("/") if part]
    group, rest = ("", parts[1:]) if parts[:1] == ["api"] else (_group(parts), parts[2:])
    if len(rest) < 2:
        raise no_such_path()
    version, rest = rest[0], rest[1:]
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    resource = catalogue.find(group, version, rest[0])
    return _place(resource, namespace, rest[1:])


def _group(parts: Sequence[str]) -> str:
    if parts[:1] != ["apis"] or len(parts) < 2:
        raise no_such_path()
    return parts[1]


def _place(resource: Resource, namespace: str, rest: Sequence[str]) -> Target:
    name, subresource = (*rest, "", "")[:2]
    misplaced = bool(namespace) and not resource.namespaced
    homeless = bool(name) and resource.namespaced and not namespace
    unknown = bool(subresource) and subresource not in resource.subresources
    if misplaced or homeless or unknown or len(rest) > 2:
        raise no_such_path()
    return Target(resource=resource, namespace=namespace, name=name, subresource=subresource)


def check_body(target: Target, body: Any) -> JsonObject:
    """A request's body with the kind and metadata that its address implies.

    Raises:
        ApiError: 400 when it contradicts the address.
    """
    resource = target.resource
    if not isinstance(body, dict):
        raise bad_request(f"the body must be an object, not {type(body).__name__}")
    for key, expected in (("apiVersion", resource.api_version), ("kind", resource.kind)):
        if body.get(key, None if resource.custom else expected) != expected:
            raise bad_request(
                f"the {key} in the data ({body.get(key)}) does not match the expected "
                f"{key} ({expected})"
            )
    metadata = dict(body.get("metadata") or {})
    for key, expected in (("namespace", target.namespace), ("name", target.name)):
        if expected and (metadata.get(key) or expected) != expected:
            raise bad_request(
                f"the {key} of the object ({metadata[key]}) does not match the {key} on "
                f"the URL ({expected})"
            )
        metadata |= {key: expected} if expected else {}
    typed = {"apiVersion": resource.api_version, "kind": resource.kind}
    return {**typed, **body, "metadata": metadata}
