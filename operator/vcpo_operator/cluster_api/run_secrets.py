"""The Secrets of a run: their content is made, read and renewed here, and told to the connections.

Nothing else in the operator holds a key, and no private key stays in its memory.
"""

from __future__ import annotations

import base64
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vcpo.wire.access.roles import RUN_ROLES, CallerRole, checked_key, new_run_keys
from vcpo.wire.access.tls import AUTHORITY_FILE, NOBODY, Trust
from vcpo_operator.children.manifest import Child, Kind
from vcpo_operator.cluster_api.certificates import (
    first_end_s,
    new_certificates,
    renewed_certificates,
)
from vcpo_operator.cluster_api.client import ApiError, Cluster, Document, Resource
from vcpo_operator.decisions.actions import IssueCertificates, IssueKeys
from vcpo_operator.decisions.conflicts import Conflict, is_ours, name_conflict
from vcpo_operator.names import RunKey, certificate_hosts, learner_host
from vcpo_operator.observed.parse import parse_child
from vcpo_operator.observed.records import ObservedChild
from vcpo_operator.signals.client import LearnerConnections

_LOGGER = logging.getLogger(__name__)


class UnusableKeyError(Exception):
    """The Secret with a run's keys holds one that nobody can show."""


class NameConflictError(Exception):
    """Somebody else's object has the name of a child that was to be created."""

    def __init__(self, conflict: Conflict) -> None:
        super().__init__(conflict.message)
        self.conflict = conflict


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCertificates:
    """What was read of a run's certificates."""

    child: ObservedChild | None
    """The Secret; None when it does not exist."""
    end_s: float
    """Unix time at which the first of them ends; 0 if they cannot be used."""


class RunSecrets:
    """Makes, reads and renews the Secrets of runs. One owner: the executor.

    clock: Unix time, for the certificates that are made.
    """

    def __init__(
        self, cluster: Cluster, learners: LearnerConnections, *, clock: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._learners = learners
        self._clock = clock

    async def issue(self, key: RunKey, action: IssueKeys | IssueCertificates) -> ObservedChild:
        """Create a Secret with new content, or renew what it holds.

        Raises: ApiError, NameConflictError.
        """
        match action:
            case IssueKeys():
                return await self._issue_keys(key, action.child)
            case IssueCertificates():
                return await self._issue_certificates(key, action)

    async def read_keys(
        self, key: RunKey, secret: str, *, owner_uid: str | None
    ) -> ObservedChild | None:
        """Read the Secret with a run's keys; None when it does not exist.

        The key for steering goes to the connections and nowhere else. The others are not kept.

        owner_uid: Uid of the run that must own the Secret; None: the user named the Secret. The
            key of somebody else's Secret is sent to nobody.
        Raises: ApiError, UnusableKeyError.
        """
        body = await self._cluster.get(_secret(key, secret))
        if body is None:
            await self._learners.set_steering_key(key, "")
            return None
        existing = parse_child(Kind.SECRET, body)
        is_readable = owner_uid is None or is_ours(existing, owner_uid)
        data = _secret_data(body) if is_readable else {}
        await self._learners.set_steering_key(key, _steering_key(data))
        for role in RUN_ROLES:
            try:
                _checked_key(data.get(role, b"-"), f"Secret {secret}, key `{role}`")
            except ValueError as error:
                raise UnusableKeyError(str(error)) from error
        return existing

    async def read_certificates(
        self, key: RunKey, secret: str, *, owner_uid: str | None
    ) -> ReadCertificates:
        """Read the Secret with a run's certificates; the connections trust its authority.

        Without an authority they trust nobody: a key is never sent to a learner in plain text
        unless the run says so.

        owner_uid: Uid of the run that must own the Secret; None: the user named the Secret.
        Raises: ApiError.
        """
        body = await self._cluster.get(_secret(key, secret))
        existing = None if body is None else parse_child(Kind.SECRET, body)
        data = _secret_data(body)
        if existing is not None and owner_uid is not None and not is_ours(existing, owner_uid):
            data = {}
        await self._trust(key, data)
        end_s = 0.0
        with contextlib.suppress(ValueError, KeyError):
            end_s = first_end_s(data, list(certificate_hosts(key)))
        return ReadCertificates(child=existing, end_s=end_s)

    async def trust_the_network(self, key: RunKey) -> None:
        """Call the learner of a run in plain text from now on."""
        await self._learners.set_trust(key, None)

    def forget(self, key: RunKey) -> None:
        """Forget a deleted run."""
        self._learners.forget(key)

    async def _issue_keys(self, key: RunKey, child: Child) -> ObservedChild:
        """Create a Secret with new keys, unless it exists already.

        Raises: ApiError, NameConflictError.
        """
        made = {role.value: each.encode() for role, each in new_run_keys().items()}
        body = await self._create_secret(key, child, made)
        await self._learners.set_steering_key(key, _steering_key(_secret_data(body)))
        return parse_child(Kind.SECRET, body)

    async def _issue_certificates(self, key: RunKey, action: IssueCertificates) -> ObservedChild:
        """Create the Secret of the certificates, or renew those that it holds.

        An authority that cannot be used is replaced, and the certificates with it.

        Raises: ApiError, NameConflictError.
        """
        child, now_s, hosts = action.child, self._clock(), certificate_hosts(key)
        resource = _secret(key, child.name)
        before = await self._cluster.get(resource) if action.renews else None
        if before is None:
            data = new_certificates(key.name, hosts, now_s=now_s)
            body = await self._create_secret(key, child, data)
        else:
            try:
                data = renewed_certificates(_secret_data(before), hosts, now_s=now_s)
            except (ValueError, KeyError):
                data = new_certificates(key.name, hosts, now_s=now_s)
            # Its resource version is that of the one read, so nobody's change is lost.
            body = await self._cluster.replace(resource, {**before, "data": _encoded(data)})
            _LOGGER.info("%s: the certificates in Secret %s are renewed", key, child.name)
        await self._trust(key, _secret_data(body))
        return parse_child(Kind.SECRET, body)

    async def _create_secret(
        self, key: RunKey, child: Child, data: Mapping[str, bytes]
    ) -> Document:
        """Create a Secret; return the one that exists already, if it is the run's.

        Raises: ApiError, NameConflictError.
        """
        collection = Resource(api_version="v1", plural=Kind.SECRET.plural, namespace=key.namespace)
        try:
            return await self._cluster.create(
                collection, {**child.manifest, "data": _encoded(data)}
            )
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

    async def _trust(self, key: RunKey, data: Mapping[str, bytes]) -> None:
        authority = data.get(AUTHORITY_FILE)
        trust = NOBODY
        if authority:
            trust = Trust(authority=authority, server_name=learner_host(key))
        await self._learners.set_trust(key, trust)


def _secret(key: RunKey, name: str) -> Resource:
    return Resource(api_version="v1", plural=Kind.SECRET.plural, namespace=key.namespace, name=name)


def _secret_data(body: Document | None) -> dict[str, bytes]:
    """Return the content of a Secret by key; what is no base 64 is left out."""
    data = {}
    for name, encoded in ((body or {}).get("data") or {}).items():
        with contextlib.suppress(ValueError):
            data[name] = base64.b64decode(encoded)
    return data


def _encoded(data: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in data.items()}


def _steering_key(data: Mapping[str, bytes]) -> str:
    """Return the key for steering; empty if there is none that a header can carry."""
    with contextlib.suppress(ValueError):
        return _checked_key(data.get(CallerRole.STEERING, b""), "")
    return ""


def _checked_key(content: bytes, source: str) -> str:
    """Return a Secret's key as `checked_key`; a byte that is no ASCII is one that it refuses."""
    return checked_key(content.decode("ascii", errors="replace"), source)
