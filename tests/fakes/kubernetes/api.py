"""The verbs of the API server, without HTTP: get, list, create, update, patch, apply, delete.

Both the HTTP front and the controllers go through here, so every change obeys the same rules:
`lifecycle` decides what is kept, `apply` who stated it, `store` keeps it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tests.fakes.kubernetes.errors import (
    Cause,
    JsonObject,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    invalid,
    not_found,
)
from tests.fakes.kubernetes.objects import deletion, lifecycle
from tests.fakes.kubernetes.objects.configurations import configuration
from tests.fakes.kubernetes.objects.definitions import established_status
from tests.fakes.kubernetes.objects.deletion import DEFINITIONS, NAMESPACES, timestamp
from tests.fakes.kubernetes.objects.resources import Catalogue, Resource
from tests.fakes.kubernetes.objects.selectors import label_matcher
from tests.fakes.kubernetes.patching.apply import APPLY, apply_document, merge_patch
from tests.fakes.kubernetes.patching.list_types import list_types
from tests.fakes.kubernetes.requests.targets import DeleteOptions, Target, WriteOptions, check_body
from tests.fakes.kubernetes.store import Event, Store

_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


class Api:
    """Objects and the rules on them. Owner: the API server's event loop.

    clock: answers the present time, zone included. seed: decides generated names and UIDs.
    """

    def __init__(self, *, clock: Callable[[], datetime] | None = None, seed: int = 0) -> None:
        self.store = Store()
        self.catalogue = Catalogue()
        self.clock = clock or (lambda: datetime.now(UTC))
        self._random = random.Random(seed)
        self.store.subscribe(self._serve_definitions)

    def copy(self) -> Api:
        """An API that holds the same now, and goes its own way from here."""
        twin = Api(clock=self.clock)
        twin.store = self.store.copy()
        twin.catalogue = Catalogue(self.catalogue)
        twin._random.setstate(self._random.getstate())
        twin.store.subscribe(twin._serve_definitions)
        return twin

    def now(self) -> str:
        return timestamp(self.clock())

    def suffix(self) -> str:
        return "".join(self._random.choices(_SUFFIX_LETTERS, k=5))

    def get(self, target: Target) -> JsonObject:
        """The object in the version of the target's resource.

        Raises:
            ApiError: 404.
        """
        return present_object(target.resource, self._require(target))

    def list(self, target: Target, labels: str = "") -> list[JsonObject]:
        """Objects that the selector matches, ordered by namespace and name."""
        matches = label_matcher(labels)
        found = self.store.objects(target.resource.key, target.namespace)
        return [present_object(target.resource, body) for body in found if matches(body)]

    def create(self, target: Target, body: Any) -> JsonObject:
        """A new object.

        Raises:
            ApiError: 400, 403, 404 (namespace), 409 (name taken) or 422.
        """
        body = check_body(target, body)
        if body["metadata"].get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        new = self._complete(target.resource, self._fresh(target, body), None)
        return self._add(target, new)

    def update(self, target: Target, body: Any) -> JsonObject:
        """Replace the object or its status.

        Raises:
            ApiError: 400, 404, 409 or 422.
        """
        return self._change(target, body, version_required=True)

    def patch(
        self, target: Target, content_type: str, patch: Any, options: WriteOptions
    ) -> tuple[JsonObject, bool]:
        """Change the object by a patch; the answer's second half says whether it is new.

        Raises:
            ApiError: 400, 404, 409, 415 or 422.
        """
        if content_type == APPLY:
            return self._apply(target, patch, options)
        if options.force:
            message = "Forbidden: may not be specified for non-apply patch"
            cause = Cause(field="force", message=message, reason="FieldValueForbidden")
            raise invalid("PatchOptions", "meta.k8s.io", "", [cause])
        if not isinstance(patch, dict):
            raise bad_request(f"the body of a {content_type} is not a {type(patch).__name__}")
        patched = merge_patch(self.get(target), patch)
        return self._change(target, patched), False

    def delete(self, target: Target, options: DeleteOptions) -> JsonObject:
        """Remove the object, or mark it as terminating; answers its last or present state.

        Raises:
            ApiError: 404, or 409 when a precondition does not hold.
        """
        resource, old = target.resource, self._require(target)
        deletion.check_preconditions(target, old, options)
        left = deletion.after_delete(resource, old, options, self.clock())
        if left is old:
            return present_object(resource, old)
        if left is None:
            return present_object(resource, self.store.remove(resource.key, old))
        return present_object(resource, self.store.put(resource.key, left))

    def schedule(self, target: Target, node: str) -> None:
        """Place a pod on a node.

        Raises:
            ApiError: 404 without the pod, 409 when it has a place.
        """
        old = self._require(target)
        if old["spec"].get("nodeName"):
            why = f"pod {target.name} is already assigned to node {old['spec']['nodeName']!r}"
            raise conflict(target.resource.qualified, target.name, why)
        self.store.put(target.resource.key, {**old, "spec": {**old["spec"], "nodeName": node}})

    def finish_deletion(self, resource: Resource, body: JsonObject) -> None:
        self.store.remove(resource.key, body)

    def _require(self, target: Target) -> JsonObject:
        body = self.store.get(target.resource.key, target.namespace, target.name)
        if body is None:
            raise not_found(target.resource.qualified, target.name)
        return body

    def _fresh(self, target: Target, body: JsonObject) -> JsonObject:
        """body as a new object: named, placed and numbered."""
        self._refuse_namespace(target)
        identity: JsonObject = {
            "uid": str(uuid.UUID(int=self._random.getrandbits(128), version=4)),
            "creationTimestamp": self.now(),
        }
        identity |= {"generation": 1} if target.resource.generation else {}
        fresh = lifecycle.fresh(target.resource, body, identity, self.suffix())
        if self.store.get(target.resource.key, target.namespace, fresh["metadata"]["name"]):
            raise already_exists(target.resource.qualified, fresh["metadata"]["name"])
        return fresh

    def _refuse_namespace(self, target: Target) -> None:
        if not target.resource.namespaced:
            return
        if not target.namespace:
            raise bad_request("an empty namespace may not be set during creation")
        namespace = self.store.get(NAMESPACES, "", target.namespace)
        if namespace is None:
            raise not_found("namespaces", target.namespace)
        if namespace["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {target.namespace}"
            raise forbidden(target.resource.qualified, target.name, f"{why}: being terminated")

    def _complete(self, resource: Resource, new: JsonObject, old: JsonObject | None) -> JsonObject:
        """new with defaults, checked; a copy that nothing else holds."""
        new = lifecycle.complete(resource, new)
        lifecycle.refuse_invalid(resource, new, old)
        if resource.key == DEFINITIONS and (old is None or old["spec"] != new["spec"]):
            new["status"] = established_status(new, self.now())
        return new

    def _change(self, target: Target, body: Any, *, version_required: bool = False) -> JsonObject:
        """Keep body instead of what is there: the end of every update and patch."""
        resource, old = target.resource, self._require(target)
        body = check_body(target, body)
        lifecycle.check_version(resource, old, body, required=version_required)
        return self._keep(target, old, self._transition(target, old, body))

    def _transition(self, target: Target, old: JsonObject, wanted: JsonObject) -> JsonObject:
        resource = target.resource
        new = lifecycle.keep_protected_fields(resource, old, wanted, target.subresource)
        if target.subresource == "status" and not resource.custom:
            return new
        new = self._complete(resource, new, old)
        return lifecycle.with_generation(resource, old, new)

    def _add(self, target: Target, new: JsonObject) -> JsonObject:
        return present_object(target.resource, self.store.put(target.resource.key, new))

    def _keep(self, target: Target, old: JsonObject, new: JsonObject) -> JsonObject:
        """Store a change; the same again is no change, and the last finalizer's end is the end."""
        resource = target.resource
        if new == old:
            return present_object(resource, new)
        kept = self.store.put(resource.key, new)
        gone = deletion.may_be_removed(resource, kept)
        return present_object(resource, self.store.remove(resource.key, kept) if gone else kept)

    def _apply(self, target: Target, config: Any, options: WriteOptions) -> tuple[JsonObject, bool]:
        resource = target.resource
        config = configuration(target, config, options.manager)
        live = self.store.get(resource.key, target.namespace, target.name)
        if live is None and target.subresource:
            raise not_found(resource.qualified, target.name)
        if live is None and config["metadata"].get("uid"):
            raise conflict(resource.qualified, target.name, "uid mismatch: no such object")
        if live is not None:
            lifecycle.check_version(resource, live, config)
        return self._merge(target, live, config, options), live is None

    def _merge(
        self, target: Target, live: JsonObject | None, config: JsonObject, options: WriteOptions
    ) -> JsonObject:
        """Apply config onto live, or create it."""
        resource, lists = target.resource, list_types(target.resource)
        writer = (options.manager, target.subresource)
        base = live or {"metadata": {}}
        merged, applied = apply_document(base, config, writer, force=options.force, lists=lists)
        if live is None:
            new = self._complete(resource, self._fresh(target, merged), None)
        else:
            new = self._transition(target, live, merged)
        new = {**new, "metadata": {**new["metadata"], "managedFields": applied}}
        return self._add(target, new) if live is None else self._keep(target, live, new)

    def _serve_definitions(self, event: Event) -> None:
        if event.resource == DEFINITIONS:
            serve = self.catalogue.undefine if event.kind == "DELETED" else self.catalogue.define
            serve(event.body)


def present_object(resource: Resource, body: JsonObject) -> JsonObject:
    """A stored object in the version that was asked for."""
    if body["apiVersion"] == resource.api_version:
        return body
    return {**body, "apiVersion": resource.api_version}
