"""Applying: carries out actions, one call each. It decides nothing."""

from __future__ import annotations

import base64
import logging
import secrets
from typing import Any

from vcpo.spec import API_VERSION, KIND
from vcpo_operator.children.manifest import Child, Kind
from vcpo_operator.cluster_api.client import ApiError, Cluster, Document, Resource
from vcpo_operator.decisions.actions import (
    Action,
    Apply,
    DeleteChild,
    DeletePod,
    DeleteRun,
    Drain,
    IssueToken,
    ReleaseLeases,
    ReportScale,
    Scale,
    SeedScaler,
    SetDeletionCost,
    Throttle,
)
from vcpo_operator.decisions.conflicts import Conflict, claim_growth_refusal, is_ours, name_conflict
from vcpo_operator.names import (
    DELETION_COST_ANNOTATION,
    FIELD_MANAGER,
    PLURAL,
    SCALE_MANAGER,
    TOKEN_KEY,
    RunKey,
)
from vcpo_operator.observed.parse import parse_child
from vcpo_operator.observed.records import ObservedChild, RunRecord
from vcpo_operator.signals.client import LearnerCommandError, LearnerConnections

_LOGGER = logging.getLogger(__name__)
_TOKEN_BYTES = 32


class NameConflictError(Exception):
    """Somebody else's object has the name of a child that was to be made."""

    def __init__(self, conflict: Conflict) -> None:
        super().__init__(conflict.message)
        self.conflict = conflict


def is_refusal(action: Action, error: ApiError) -> bool:
    """Whether the manifest itself is refused: the same again would be, whenever it is sent.

    A storage class that does not let its claims expand answers 403, as an admission plugin does.
    """
    if not isinstance(action, Apply):
        return False
    is_growth = action.child.kind is Kind.CLAIM and action.force
    return error.is_invalid or (is_growth and error.is_forbidden)


class Executor:
    """Carries out actions on the objects and the learner of a run."""

    def __init__(self, cluster: Cluster, lines: LearnerConnections) -> None:
        self._cluster = cluster
        self._lines = lines

    async def execute(self, key: RunKey, action: Action) -> ObservedChild | None:
        """Do one thing; returns the child as it is after an apply.

        Raises: ApiError, NameConflictError, LearnerCommandError.
        """
        match action:
            case Apply():
                return await self._apply(key, action)
            case IssueToken():
                return await self._issue(key, action.child)
            case SeedScaler():
                await self._seed(key, action)
            case Scale():
                await self._scale(key, action)
            case ReportScale():
                await self._report_scale(key, action)
            case SetDeletionCost():
                await self._set_deletion_cost(key, action)
            case DeleteChild() | DeletePod() | DeleteRun():
                await self._cluster.delete(_deleted(key, action), uid=action.uid)
            case Throttle() | Drain() | ReleaseLeases():
                await self._order(key, action)
        return None

    async def read(self, key: RunKey, kind: Kind, name: str) -> ObservedChild | None:
        """Look at a child of a kind that is not watched; None when there is none."""
        body = await self._cluster.get(_child(kind, key, name))
        return None if body is None else parse_child(kind, body)

    async def read_token(
        self, key: RunKey, secret: str, *, owner_uid: str | None
    ) -> ObservedChild | None:
        """Read the Secret with a run's token and show it to the learner; None when there is none.

        The token goes no further than to the connections.

        owner_uid: Uid of the run that it must belong to; None: the user has named it. What is
            somebody else's is shown to nobody.
        Raises: ApiError.
        """
        body = await self._cluster.get(_child(Kind.SECRET, key, secret))
        there = None if body is None else parse_child(Kind.SECRET, body)
        may_show = there is not None and (owner_uid is None or is_ours(there, owner_uid))
        await self._lines.set_token(key, _token(body) if body is not None and may_show else "")
        return there

    def forget(self, key: RunKey) -> None:
        """Forget the token of a run that is gone."""
        self._lines.forget_token(key)

    async def write_status(self, record: RunRecord, status: dict[str, Any]) -> Document:
        """Apply a run's status, and no one else's who has its name by now.

        Raises: ApiError.
        """
        metadata = {"name": record.key.name, "namespace": record.key.namespace, "uid": record.uid}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}
        resource = _run(record.key, subresource="status")
        return await self._cluster.apply(resource, body, manager=FIELD_MANAGER, force=True)

    async def read_events(self, key: RunKey, uid: str) -> list[Document]:
        """Events about the object with this uid.

        Raises: ApiError.
        """
        collection = Resource(api_version="v1", plural="events", namespace=key.namespace)
        return await self._cluster.select(collection, fields=f"involvedObject.uid={uid}")

    async def post_event(self, key: RunKey, event: Document) -> None:
        """Post an event; the API server keeps it for an hour or so.

        Raises: ApiError.
        """
        collection = Resource(api_version="v1", plural="events", namespace=key.namespace)
        await self._cluster.create(collection, event)

    async def _apply(self, key: RunKey, action: Apply) -> ObservedChild:
        child = action.child
        force = action.force or await self._is_to_be_taken(key, child)
        resource = _child(child.kind, key, child.name)
        try:
            body = await self._cluster.apply(
                resource, child.manifest, manager=FIELD_MANAGER, force=force
            )
        except ApiError as error:
            if child.kind is Kind.CLAIM and force and is_refusal(action, error):
                raise ApiError(
                    error.status, claim_growth_refusal(child.name, error.message)
                ) from error
            raise
        return parse_child(child.kind, body)

    async def _issue(self, key: RunKey, child: Child) -> ObservedChild:
        """Make a Secret with a new token, unless there is one already.

        Raises: ApiError, NameConflictError.
        """
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        encoded = base64.b64encode(token.encode()).decode()
        collection = Resource(api_version="v1", plural=Kind.SECRET.plural, namespace=key.namespace)
        whole = {**child.manifest, "data": {TOKEN_KEY: encoded}}
        try:
            body = await self._cluster.create(collection, whole)
        except ApiError as error:
            if not error.is_gone:
                raise
            there = await self.read_token(key, child.name, owner_uid=child.owner_uid)
            if there is None:
                raise
            conflict = name_conflict(there, child.owner_uid)
            if conflict is not None:
                raise NameConflictError(conflict) from error
            return there
        await self._lines.set_token(key, token)
        return parse_child(Kind.SECRET, body)

    async def _is_to_be_taken(self, key: RunKey, child: Child) -> bool:
        """Whether there is an object that the run may have, of a child that no watch has told of.

        What does not carry the run's label is not watched; and an apply without force goes through
        where nobody else set the fields that it sets.

        Raises: NameConflictError when it is somebody else's.
        """
        body = await self._cluster.get(_child(child.kind, key, child.name))
        if body is None:
            return False
        conflict = name_conflict(parse_child(child.kind, body), child.owner_uid)
        if conflict is not None:
            raise NameConflictError(conflict)
        return True

    async def _seed(self, key: RunKey, action: SeedScaler) -> None:
        """Apply what makes the scaler ours; without its digest, so that the rest follows."""
        await self._is_to_be_taken(key, action.child)
        manifest = action.child.manifest
        whole = manifest["metadata"]
        metadata = {name: part for name, part in whole.items() if name != "annotations"}
        spec = {**manifest["spec"], "replicas": action.replicas}
        await self._cluster.apply(
            _child(Kind.SCALER, key, action.child.name),
            {**manifest, "metadata": metadata, "spec": spec},
            manager=SCALE_MANAGER,
            force=False,
        )

    async def _scale(self, key: RunKey, action: Scale) -> None:
        resource = _child(Kind.DEPLOYMENT, key, action.name, subresource="scale")
        body = {"spec": {"replicas": action.replicas}}
        await self._unless_gone(resource, body, manager=SCALE_MANAGER)

    async def _report_scale(self, key: RunKey, action: ReportScale) -> None:
        kind = Kind.SCALER
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"name": action.name, "namespace": key.namespace, "uid": action.uid},
            "status": {"replicas": action.replicas, "selector": action.selector},
        }
        resource = _child(kind, key, action.name, subresource="status")
        await self._cluster.apply(resource, body, manager=FIELD_MANAGER, force=True)

    async def _order(self, key: RunKey, action: Throttle | Drain | ReleaseLeases) -> None:
        """Tell the learner."""
        match action:
            case Throttle():
                await self._lines.throttle(key, action.admission_lag_steps, action.reason)
            case Drain():
                await self._drain(key, action)
            case ReleaseLeases():
                await self._lines.release(key, action.worker)

    async def _drain(self, key: RunKey, action: Drain) -> None:
        try:
            await self._lines.drain(key, action.reason)
        except LearnerCommandError as error:
            # Its pod is told the same by SIGTERM; nothing may keep a run from coming to rest.
            _LOGGER.warning("%s: %s", key, error)

    async def _set_deletion_cost(self, key: RunKey, action: SetDeletionCost) -> None:
        annotations = {DELETION_COST_ANNOTATION: str(action.cost)}
        body = {"metadata": {"annotations": annotations}}
        await self._unless_gone(_pod(key, action.pod), body, manager=SCALE_MANAGER)

    async def _unless_gone(self, resource: Resource, body: Document, *, manager: str) -> None:
        try:
            await self._cluster.merge(resource, body, manager=manager)
        except ApiError as error:
            if not error.is_gone:
                raise


def _token(secret: Document) -> str:
    """The token in a Secret; empty when it holds none that could be sent."""
    try:
        return base64.b64decode((secret.get("data") or {}).get(TOKEN_KEY, "")).decode("ascii")
    except ValueError:
        return ""


def _deleted(key: RunKey, action: DeleteChild | DeletePod | DeleteRun) -> Resource:
    match action:
        case DeleteChild():
            return _child(action.kind, key, action.name)
        case DeletePod():
            return _pod(key, action.name)
        case DeleteRun():
            return _run(key)


def _child(kind: Kind, key: RunKey, name: str, *, subresource: str = "") -> Resource:
    return Resource(
        api_version=kind.api_version,
        plural=kind.plural,
        namespace=key.namespace,
        name=name,
        subresource=subresource,
    )


def _pod(key: RunKey, name: str) -> Resource:
    return Resource(api_version="v1", plural="pods", namespace=key.namespace, name=name)


def _run(key: RunKey, *, subresource: str = "") -> Resource:
    return Resource(
        api_version=API_VERSION,
        plural=PLURAL,
        namespace=key.namespace,
        name=key.name,
        subresource=subresource,
    )
