"""The Secrets of a run: their content is made and renewed here.

No private key stays in the operator's memory.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping

from vcpo.wire.access.roles import new_run_keys
from vcpo_operator.children.manifest import Child, Kind
from vcpo_operator.cluster_api.certificates import new_certificates, renewed_certificates
from vcpo_operator.cluster_api.client import ApiError, Cluster, Document, Resource
from vcpo_operator.decisions.actions import IssueSecret
from vcpo_operator.decisions.conflicts import Conflict, name_conflict
from vcpo_operator.names import RunKey, certificate_hosts, certificates_name
from vcpo_operator.observed.access import secret_data
from vcpo_operator.observed.parse import parse_child
from vcpo_operator.observed.records import ObservedChild

_LOGGER = logging.getLogger(__name__)


class NameConflictError(Exception):
    """Somebody else's object has the name of a child that was to be created."""

    def __init__(self, conflict: Conflict) -> None:
        super().__init__(conflict.message)
        self.conflict = conflict


class RunSecrets:
    """Makes and renews the Secrets of runs. One owner: the executor.

    clock: Unix time, for the certificates that are made.
    """

    def __init__(self, cluster: Cluster, *, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock

    async def issue(self, key: RunKey, action: IssueSecret) -> ObservedChild:
        """Create a Secret with new content, unless it exists, or renew what it holds.

        Raises: ApiError, NameConflictError.
        """
        child = action.child
        if child.name == certificates_name(key.name):
            body = await self._issue_certificates(key, action)
        else:
            made = {role.value: each.encode() for role, each in new_run_keys().items()}
            body = await self._create_secret(key, child, made)
        return parse_child(Kind.SECRET, body)

    async def _issue_certificates(self, key: RunKey, action: IssueSecret) -> Document:
        """Create the Secret of the certificates, or renew those that it holds.

        An authority that cannot be used is replaced, and the certificates with it.

        Raises: ApiError, NameConflictError.
        """
        child, now_s, hosts = action.child, self._clock(), certificate_hosts(key)
        resource = _secret(key, child.name)
        before = await self._cluster.get(resource) if action.renews else None
        if before is None:
            data = new_certificates(key.name, hosts, now_s=now_s)
            return await self._create_secret(key, child, data)
        try:
            data = renewed_certificates(secret_data(before), hosts, now_s=now_s)
        except (ValueError, KeyError):
            data = new_certificates(key.name, hosts, now_s=now_s)
        # Its resource version is that of the one read, so nobody's change is lost.
        body = await self._cluster.replace(resource, {**before, "data": _encode(data)})
        _LOGGER.info("%s: the certificates in Secret %s are renewed", key, child.name)
        return body

    async def _create_secret(
        self, key: RunKey, child: Child, data: Mapping[str, bytes]
    ) -> Document:
        """Create a Secret; return the one that exists already, if it is the run's.

        Raises: ApiError, NameConflictError.
        """
        collection = Resource(api_version="v1", plural=Kind.SECRET.plural, namespace=key.namespace)
        try:
            return await self._cluster.create(collection, {**child.manifest, "data": _encode(data)})
        except ApiError as error:
            if not error.is_gone:
                raise
            existing = await self._cluster.get(_secret(key, child.name))
            if existing is None:
                raise
            conflict = name_conflict(parse_child(Kind.SECRET, existing), child.owner_uid)
            if conflict is not None:
                raise NameConflictError(conflict) from error
            return existing


def _secret(key: RunKey, name: str) -> Resource:
    return Resource(api_version="v1", plural=Kind.SECRET.plural, namespace=key.namespace, name=name)


def _encode(data: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in data.items()}
