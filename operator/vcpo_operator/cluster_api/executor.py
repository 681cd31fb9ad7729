"""The executor: it executes actions, and decides nothing."""

import logging
import time
from collections.abc import Callable
from typing import Any

from vcpo.api import API_VERSION, KIND
from vcpo_operator.children.manifest import Child, Kind
from vcpo_operator.cluster_api.client import ApiError, Cluster, Document, Resource
from vcpo_operator.cluster_api.run_secrets import NameConflictError, RunSecrets
from vcpo_operator.decisions.conflicts import name_conflict
from vcpo_operator.decisions.plan import (
    Action,
    Apply,
    Delete,
    Drain,
    IssueSecret,
    ReleaseLeases,
    SetDeletionCost,
    Throttle,
)
from vcpo_operator.names import DELETION_COST_ANNOTATION, FIELD_MANAGER, RunKey
from vcpo_operator.observed.parse import LearnerAccess, parse_child
from vcpo_operator.observed.records import ObservedChild, RunRecord
from vcpo_operator.signals.client import LearnerCommandError, LearnerConnections

_LOGGER = logging.getLogger(__name__)


def is_refusal(action: Action, error: ApiError) -> bool:
    """Whether the API server refused the manifest itself, so that a retry would fail too.

    A storage class that does not allow expansion answers 403, as an admission plugin does.
    """
    if not isinstance(action, Apply):
        return False
    is_growth = action.child.kind is Kind.CLAIM and action.force
    return error.is_invalid or (is_growth and error.is_forbidden)


class Executor:
    """Executes actions on the objects and the learner of a run. One owner: the reconciler."""

    def __init__(
        self,
        cluster: Cluster,
        learners: LearnerConnections,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the executor.

        clock: Unix time, for the certificates that are made.
        """
        self._secrets = RunSecrets(cluster, clock)
        self._cluster = cluster
        self._learners = learners

    async def execute(self, key: RunKey, action: Action) -> ObservedChild | None:
        """Execute one action; returns the child after an apply."""
        match action:
            case Apply():
                return await self._apply(key, action)
            case IssueSecret():
                return await self._secrets.issue(key, action)
            case SetDeletionCost():
                annotations = {DELETION_COST_ANNOTATION: str(action.cost)}
                await self._annotate(_object(Kind.POD, key, action.pod), annotations)
            case Delete():
                resource = _object(action.kind, key, action.name)
                await self._cluster.delete(resource, uid=action.uid, grace_s=action.grace_s)
            case Throttle() | ReleaseLeases():
                await self._learners.send(key, action)
            case Drain():
                try:
                    await self._learners.send(key, action)
                except LearnerCommandError as error:
                    # Its pod gets SIGTERM too, and nothing may keep a run from being suspended.
                    _LOGGER.warning("%s: %s", key, error)
        return None

    async def read(self, key: RunKey, kind: Kind, name: str) -> ObservedChild | None:
        """Read a child of a kind that is not watched; None when it does not exist."""
        body = await self._cluster.get(_object(kind, key, name))
        return None if body is None else parse_child(kind, body)

    async def read_secret(self, key: RunKey, name: str) -> Document | None:
        """Read a Secret with its content; None when it does not exist."""
        return await self._cluster.get(_object(Kind.SECRET, key, name))

    async def set_access(self, key: RunKey, access: LearnerAccess | None) -> None:
        await self._learners.set_access(key, access)

    async def write_status(self, record: RunRecord, status: dict[str, Any]) -> Document:
        """Apply the status of the run with this uid, not of a later run of its name."""
        metadata = {"name": record.key.name, "namespace": record.key.namespace, "uid": record.uid}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}
        resource = _object(Kind.RUN, record.key, record.key.name, subresource="status")
        return await self._cluster.apply(resource, body, manager=FIELD_MANAGER, force=True)

    async def post_event(self, key: RunKey, event: Document) -> None:
        """Post an event; the API server keeps it for about an hour."""
        collection = Resource(api_version="v1", plural="events", namespace=key.namespace)
        await self._cluster.create(collection, event)

    async def _apply(self, key: RunKey, action: Apply) -> ObservedChild:
        child = action.child
        force = action.force or await self._is_adopted(key, child)
        resource = _object(child.kind, key, child.name)
        body = await self._cluster.apply(
            resource, child.manifest, manager=FIELD_MANAGER, force=force
        )
        return parse_child(child.kind, body)

    async def _is_adopted(self, key: RunKey, child: Child) -> bool:
        """Whether a child that no watch has shown exists and the run may have it.

        Objects without the run's label are not watched. And an apply without force succeeds where
        nobody else has set the same fields, so it would take over somebody else's object.

        Raises: NameConflictError when the object is somebody else's.
        """
        body = await self._cluster.get(_object(child.kind, key, child.name))
        if body is None:
            return False
        conflict = name_conflict(parse_child(child.kind, body), child.owner_uid)
        if conflict is not None:
            raise NameConflictError(conflict)
        return True

    async def _annotate(self, resource: Resource, annotations: dict[str, str]) -> None:
        try:
            body = {"metadata": {"annotations": annotations}}
            await self._cluster.merge(resource, body, manager=FIELD_MANAGER)
        except ApiError as error:
            if not error.is_gone:
                raise


def _object(kind: Kind, key: RunKey, name: str, *, subresource: str = "") -> Resource:
    return Resource(
        api_version=kind.api_version,
        plural=kind.plural,
        namespace=key.namespace,
        name=name,
        subresource=subresource,
    )
