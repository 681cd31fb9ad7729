"""Garbage collection: dependents follow their owners, contents follow namespaces and definitions.

Source: https://kubernetes.io/docs/concepts/architecture/garbage-collection/
"""

from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.errors import JsonObject
from tests.fakes.kubernetes.objects.definitions import CLEANUP_FINALIZER
from tests.fakes.kubernetes.objects.deletion import NAMESPACES
from tests.fakes.kubernetes.requests.targets import DeleteOptions, Target, WriteOptions
from tests.fakes.kubernetes.store import ResourceKey, identity

MANAGER = "kube-controller-manager"
OPTIONS = WriteOptions(manager=MANAGER)


def target_for(api: Api, resource: ResourceKey, body: JsonObject, subresource: str = "") -> Target:
    """The address of a stored object."""
    namespace, name = identity(body)
    return Target(
        resource=api.catalogue.by_key(*resource),
        namespace=namespace,
        name=name,
        subresource=subresource,
    )


def change(
    api: Api, resource: ResourceKey, body: JsonObject, patch: JsonObject, subresource: str = ""
) -> None:
    """Merge a patch into a stored object as the controller manager."""
    target = target_for(api, resource, body, subresource)
    api.patch(target, "application/merge-patch+json", patch, OPTIONS)


def delete(api: Api, resource: ResourceKey, body: JsonObject) -> None:
    """Delete a stored object, once."""
    if not body["metadata"].get("deletionTimestamp"):
        api.delete(target_for(api, resource, body), DeleteOptions())


def collect(api: Api, resource: ResourceKey, body: JsonObject) -> bool:
    """Delete body when all its owners are gone; whether they are."""
    owners = body["metadata"].get("ownerReferences") or ()
    if owners and not any(api.store.place(owner["uid"]) for owner in owners):
        delete(api, resource, body)
        return True
    return False


def _drop_finalizer(api: Api, resource: ResourceKey, body: JsonObject, finalizer: str) -> None:
    left = [f for f in body["metadata"]["finalizers"] if f != finalizer]
    change(api, resource, body, {"metadata": {"finalizers": left or None}})


def empty_namespace(api: Api, namespace: JsonObject) -> None:
    """Delete the contents of a terminating namespace, then the namespace."""
    if not namespace["metadata"].get("deletionTimestamp"):
        return
    name = namespace["metadata"]["name"]
    for resource, body in api.store.everything():
        if body["metadata"].get("namespace") == name:
            delete(api, resource, body)
    left = any(b["metadata"].get("namespace") == name for _, b in api.store.everything())
    if not left and not namespace["metadata"].get("finalizers"):
        api.finish_deletion(api.catalogue.by_key(*NAMESPACES), namespace)


def empty_definition(api: Api, definition: JsonObject) -> None:
    """Delete the objects of a terminating definition, then let the definition go."""
    metadata, spec = definition["metadata"], definition["spec"]
    if not metadata.get("deletionTimestamp"):
        return
    key = (spec["group"], spec["names"]["plural"])
    for body in api.store.objects(key):
        delete(api, key, body)
    if not api.store.objects(key) and CLEANUP_FINALIZER in (metadata.get("finalizers") or ()):
        resource = ("apiextensions.k8s.io", "customresourcedefinitions")
        _drop_finalizer(api, resource, definition, CLEANUP_FINALIZER)
