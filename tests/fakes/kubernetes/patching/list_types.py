"""Which lists merge by key, which are sets, and what is replaced whole.

Server-side apply needs it at every path: built-in kinds answer from a table, custom resources
from their schema, and whatever has no answer is atomic when it is a list, granular when a map.
Source: https://kubernetes.io/docs/reference/using-api/server-side-apply/#merge-strategy
"""

from typing import Protocol

from tests.fakes.kubernetes.errors import JsonObject
from tests.fakes.kubernetes.objects.resources import Resource

Fields = tuple[str, ...]
ATOMIC: Fields = ()
SET: Fields = ("",)
KEY_DEFAULTS = {"protocol": "TCP"}
"""Values that a missing key of a keyed list stands for."""

_KEYS: dict[str, Fields] = {
    "conditions": ("type",),
    "containers": ("name",),
    "env": ("name",),
    "ephemeralContainers": ("name",),
    "finalizers": SET,
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "podIPs": ("ip",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "secrets": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
_ATOMIC_MAPS = {
    "configMapKeyRef",
    "fieldRef",
    "labelSelector",
    "namespaceSelector",
    "podSelector",
    "resourceFieldRef",
    "secretKeyRef",
    "selector",
}


class ListTypes(Protocol):
    """How the value at a path of field names merges. Items of a list add nothing to the path."""

    def list_keys(self, fields: Fields) -> Fields:
        """ATOMIC, SET, or the names of the keys that identify an item."""
        ...

    def atomic_map(self, fields: Fields) -> bool:
        """Whether the map at this path has one owner as a whole."""
        ...


class BuiltinLists:
    """Merge rules of the built-in kinds, by the name of the field."""

    def list_keys(self, fields: Fields) -> Fields:
        """See ListTypes."""
        if fields[-1:] == ("ports",):
            if "containers" in fields or "initContainers" in fields:
                return ("containerPort", "protocol")
            return ("port", "protocol") if fields == ("spec", "ports") else ATOMIC
        return _KEYS.get(fields[-1], ATOMIC) if fields else ATOMIC

    def atomic_map(self, fields: Fields) -> bool:
        return fields[-1:] != () and fields[-1] in _ATOMIC_MAPS


class SchemaLists:
    """Merge rules that a custom resource's schema states; metadata follows the built-in kinds."""

    def __init__(self, schema: JsonObject) -> None:
        self._schema = schema
        self._metadata = BuiltinLists()

    def list_keys(self, fields: Fields) -> Fields:
        """See ListTypes."""
        if fields[:1] == ("metadata",):
            return self._metadata.list_keys(fields)
        node = self._at(fields)
        match node.get("x-kubernetes-list-type"):
            case "map":
                return tuple(node["x-kubernetes-list-map-keys"])
            case "set":
                return SET
            case _:
                return ATOMIC

    def atomic_map(self, fields: Fields) -> bool:
        return self._at(fields).get("x-kubernetes-map-type") == "atomic"

    def _at(self, fields: Fields) -> JsonObject:
        node = self._schema
        for field in fields:
            while "items" in node:
                node = node["items"]
            extra = node.get("additionalProperties")
            properties = node.get("properties") or {}
            node = properties.get(field) or (extra if isinstance(extra, dict) else {})
        return node


def list_types(resource: Resource) -> ListTypes:
    """The merge rules of a resource."""
    return SchemaLists(resource.schema.document) if resource.schema is not None else BuiltinLists()
