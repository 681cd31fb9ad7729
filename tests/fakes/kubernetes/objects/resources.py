"""The catalogue of kinds: those of this fake API server, and those that CRDs add.

Only what the project touches is listed; one line adds a kind.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.fakes.kubernetes.errors import JsonObject, no_such_path
from tests.fakes.kubernetes.objects.schema import Schema

CORE_VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One served resource: where it lives in the URL and which rules apply to it.

    subresources: names after the object's own, such as `status`.
    generation: whether metadata.generation counts changes of what the user asked for.
    schema: the structural schema of a custom resource, None for built-ins.
    """

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    subresources: tuple[str, ...] = ()
    generation: bool = False
    schema: Schema | None = field(default=None, compare=False)

    @property
    def key(self) -> tuple[str, str]:
        return self.group, self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def custom(self) -> bool:
        return self.schema is not None


def _builtin(
    group_version: str,
    plural: str,
    kind: str,
    *subresources: str,
    generation: bool = False,
    namespaced: bool = True,
) -> Resource:
    group, _, version = group_version.rpartition("/")
    return Resource(
        group=group,
        version=version,
        plural=plural,
        kind=kind,
        namespaced=namespaced,
        subresources=subresources,
        generation=generation,
    )


_APPS = "apps/v1"
_RBAC = "rbac.authorization.k8s.io/v1"
_ADMISSION = "admissionregistration.k8s.io/v1"
_POLICY = "ValidatingAdmissionPolicy"
_DEFINITIONS = ("apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition")

BUILTINS = (
    _builtin("v1", "namespaces", "Namespace", "status", namespaced=False),
    _builtin("v1", "nodes", "Node", "status", namespaced=False),
    _builtin("v1", "pods", "Pod", "status", "binding", "eviction"),
    _builtin("v1", "services", "Service", "status"),
    _builtin("v1", "configmaps", "ConfigMap"),
    _builtin("v1", "secrets", "Secret"),
    _builtin("v1", "serviceaccounts", "ServiceAccount"),
    _builtin("v1", "events", "Event"),
    _builtin("v1", "persistentvolumeclaims", "PersistentVolumeClaim", "status"),
    _builtin(_APPS, "deployments", "Deployment", "status", generation=True),
    _builtin(_APPS, "replicasets", "ReplicaSet", "status", generation=True),
    _builtin(_APPS, "statefulsets", "StatefulSet", "status", generation=True),
    _builtin("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget", "status", generation=True),
    _builtin("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", generation=True),
    _builtin("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", namespaced=False),
    _builtin(_RBAC, "roles", "Role"),
    _builtin(_RBAC, "rolebindings", "RoleBinding"),
    _builtin(_RBAC, "clusterroles", "ClusterRole", namespaced=False),
    _builtin(_RBAC, "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
    _builtin(_ADMISSION, "validatingadmissionpolicies", _POLICY, generation=True, namespaced=False),
    _builtin(
        _ADMISSION, "validatingadmissionpolicybindings", f"{_POLICY}Binding", namespaced=False
    ),
    _builtin(*_DEFINITIONS, "status", generation=True, namespaced=False),
)


def resources_of(definition: JsonObject) -> Iterator[Resource]:
    """The resources that a CustomResourceDefinition serves, one for each served version."""
    spec = definition["spec"]
    names = spec["names"]
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        subresources = version.get("subresources") or {}
        yield Resource(
            group=spec["group"],
            version=version["name"],
            plural=names["plural"],
            kind=names["kind"],
            namespaced=spec["scope"] == "Namespaced",
            subresources=tuple(subresources),
            generation=True,
            schema=Schema(version["schema"]["openAPIV3Schema"]),
        )


class Catalogue:
    """All resources served now. Owner: the API server's event loop."""

    def __init__(self, resources: Iterable[Resource] = BUILTINS) -> None:
        self._resources = {(r.group, r.version, r.plural): r for r in resources}

    def __iter__(self) -> Iterator[Resource]:
        return iter(self._resources.values())

    def find(self, group: str, version: str, plural: str) -> Resource:
        """The resource at that address.

        Raises:
            ApiError: 404 when nothing is served there.
        """
        try:
            return self._resources[group, version, plural]
        except KeyError:
            raise no_such_path() from None

    def by_key(self, group: str, plural: str) -> Resource:
        """Any served version of the resource; built-ins have one.

        Raises:
            ApiError: 404 when no version is served.
        """
        for resource in self:
            if resource.key == (group, plural):
                return resource
        raise no_such_path()

    def define(self, definition: JsonObject) -> None:
        """Serve what a CustomResourceDefinition declares, instead of what it declared before."""
        self.undefine(definition)
        for resource in resources_of(definition):
            self._resources[resource.group, resource.version, resource.plural] = resource

    def undefine(self, definition: JsonObject) -> None:
        """Serve the definition's resources no longer."""
        key = (definition["spec"]["group"], definition["spec"]["names"]["plural"])
        for address in [a for a, resource in self._resources.items() if resource.key == key]:
            del self._resources[address]
