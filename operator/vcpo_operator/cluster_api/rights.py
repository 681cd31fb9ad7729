"""The rights that the operator needs, and those that its account lacks.

Without a right to list or watch, kopf would retry for ever in silence.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from vcpo_operator.children.manifest import Kind
from vcpo_operator.cluster_api.client import Cluster, Resource
from vcpo_operator.names import GROUP, PLURAL
from vcpo_operator.observed.index_view import WATCHED

_REVIEWS: Final = Resource(
    api_version="authorization.k8s.io/v1", plural="selfsubjectaccessreviews", namespace=""
)


Right = tuple[str, str, str]
"""Group, plural (with a subresource after a slash), and verb."""


def needed_rights(*, namespaced: bool) -> Iterator[Right]:
    """Yield what the operator cannot work without."""
    verbs = {
        (GROUP, PLURAL): "list watch delete",
        (GROUP, f"{PLURAL}/status"): "patch",
        ("", "pods"): "list watch patch delete",
        ("", "secrets"): "get create update",
        ("", "events"): "create",
        **{(kind.group, kind.plural): "get list watch create patch delete" for kind in WATCHED},
        (Kind.CLAIM.group, Kind.CLAIM.plural): "get list watch create patch",
    }
    if not namespaced:
        verbs["apiextensions.k8s.io", "customresourcedefinitions"] = "list watch"
    for (group, resource), names in verbs.items():
        yield from ((group, resource, verb) for verb in names.split())


async def missing_rights(cluster: Cluster, namespaces: Sequence[str]) -> str:
    """Return what the operator's account may not do, in one line with the fix; empty: nothing.

    namespaces: Those that the operator watches; empty is all.
    """
    rights = list(needed_rights(namespaced=bool(namespaces)))
    wanted = [(right, place) for place in namespaces or [""] for right in rights]
    allowed = await asyncio.gather(*(_is_allowed(cluster, *each) for each in wanted))
    missing: dict[str, list[str]] = defaultdict(list)
    for ((group, resource, verb), place), is_allowed in zip(wanted, allowed, strict=True):
        if not is_allowed:
            where = f" in namespace {place}" if place else ""
            missing[".".join(filter(None, (resource, group))) + where].append(verb)
    if not missing:
        return ""
    listed = "; ".join(f"{'/'.join(verbs)} {what}" for what, verbs in missing.items())
    return f"the operator's account may not {listed}: grant it the roles of the chart (rbac.create)"


async def _is_allowed(cluster: Cluster, right: Right, namespace: str) -> bool:
    group, path, verb = right
    resource, _, subresource = path.partition("/")
    asked = {"group": group, "resource": resource, "subresource": subresource, "verb": verb}
    attributes = {"namespace": namespace, **asked}
    answer = await cluster.create(_REVIEWS, {"spec": {"resourceAttributes": attributes}})
    return bool(answer["status"]["allowed"])
