"""A record of every request on a resource, in the words of RBAC."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakes.kubernetes.requests.targets import Target

WRITES = frozenset({"create", "update", "patch", "delete"})


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Permission:
    """What a rule of a Role grants. resource: `plural` or `plural/subresource`."""

    group: str
    resource: str
    verb: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One request. body: parsed, None without one. content_type: of the body."""

    verb: str
    group: str
    version: str
    resource: str
    subresource: str
    namespace: str
    name: str
    user: str
    user_agent: str
    content_type: str
    query: Mapping[str, str]
    body: Any

    @property
    def permission(self) -> Permission:
        resource = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return Permission(group=self.group, resource=resource, verb=self.verb)

    def __str__(self) -> str:
        place = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.verb} {self.permission.resource} {place}".rstrip()


def make_record(
    verb: str,
    target: Target,
    *,
    user: str,
    headers: Mapping[str, str],
    query: Mapping[str, str],
    body: Any,
) -> Recorded:
    """The record of a request."""
    return Recorded(
        verb=verb,
        group=target.resource.group,
        version=target.resource.version,
        resource=target.resource.plural,
        subresource=target.subresource,
        namespace=target.namespace,
        name=target.name,
        user=user,
        user_agent=headers.get("User-Agent", ""),
        content_type=headers.get("Content-Type", "").partition(";")[0],
        query=dict(query),
        body=body,
    )


class Recorder:
    """All requests since the start, oldest first."""

    def __init__(self) -> None:
        self._requests: list[Recorded] = []

    def __iter__(self) -> Iterator[Recorded]:
        return iter(tuple(self._requests))

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Recorded) -> None:
        self._requests.append(request)

    def clear(self) -> None:
        self._requests.clear()

    def writes(self) -> list[Recorded]:
        return [request for request in self if request.verb in WRITES]


def permissions(requests: Iterable[Recorded]) -> frozenset[Permission]:
    """The least that must be granted for these requests to pass."""
    return frozenset(request.permission for request in requests)


def granted_permissions(rules: Iterable[Mapping[str, Any]]) -> frozenset[Permission]:
    """What the rules of a Role grant, wildcards taken literally."""
    return frozenset(
        Permission(group=group, resource=resource, verb=verb)
        for rule in rules
        for group in rule.get("apiGroups") or ()
        for resource in rule.get("resources") or ()
        for verb in rule.get("verbs") or ()
    )
