"""What the API server refuses of built-in kinds, as far as the operator can meet it in a test.

Each check answers causes, and an object is refused with all of them at once. Fields and types are
for `kubernetes_validate`, by which the unit tests judge every child.
Source: https://github.com/kubernetes/kubernetes/tree/master/pkg/apis (each `validation.go`)
"""

import json
from collections.abc import Callable, Iterator
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

from tests.fakes.kubernetes.errors import Cause, JsonObject

_STATEFUL_SET_MUTABLE = (
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
)


def builtin_causes(kind: str, new: JsonObject, old: JsonObject | None) -> Iterator[Cause]:
    """Mistakes in the spec of a built-in object. old: None when it is being created."""
    check = _BY_KIND.get(kind)
    if check is not None:
        yield from check(new, old or {})


def _workload(new: JsonObject, old: JsonObject) -> Iterator[Cause]:
    yield from _mounts(new["spec"]["template"]["spec"], "spec.template.spec")


def _stateful_set(new: JsonObject, old: JsonObject) -> Iterator[Cause]:
    yield from _workload(new, old)
    if not old:
        return
    fields = (old["spec"].keys() | new["spec"].keys()) - set(_STATEFUL_SET_MUTABLE)
    if any(old["spec"].get(field) != new["spec"].get(field) for field in fields):
        message = (
            "Forbidden: updates to statefulset spec for fields other than "
            f"{', '.join(repr(field) for field in _STATEFUL_SET_MUTABLE)} are forbidden"
        )
        yield Cause(field="spec", message=message, reason="FieldValueForbidden")


def _mounts(spec: JsonObject, field: str) -> Iterator[Cause]:
    """Mounts of volumes that the pod does not have."""
    volumes = {volume["name"] for volume in spec.get("volumes") or ()}
    for index, container in enumerate(spec["containers"]):
        for number, mount in enumerate(container.get("volumeMounts") or ()):
            if mount["name"] not in volumes:
                yield Cause(
                    field=f"{field}.containers[{index}].volumeMounts[{number}].name",
                    message=f"Not found: {json.dumps(mount['name'])}",
                    reason="FieldValueNotFound",
                )


def _claim(new: JsonObject, old: JsonObject) -> Iterator[Cause]:
    """A claim keeps what it is; once bound, it may grow."""
    if not old or new["spec"] == old["spec"]:
        return
    before, after = _storage(old), _storage(new)
    bound = (old.get("status") or {}).get("phase") == "Bound"
    if _without_storage(new) != _without_storage(old) or (after != before and not bound):
        message = (
            "Forbidden: spec is immutable after creation except resources.requests for bound claims"
        )
        yield Cause(field="spec", message=message, reason="FieldValueForbidden")
    elif after < before:
        field = "spec.resources.requests.storage"
        message = "Forbidden: field can not be less than previous value"
        yield Cause(field=field, message=message, reason="FieldValueForbidden")


def _storage(claim: JsonObject) -> Decimal:
    return Decimal(parse_quantity(claim["spec"]["resources"]["requests"]["storage"]))


def _without_storage(claim: JsonObject) -> JsonObject:
    return {**claim["spec"], "resources": {}}


_BY_KIND: dict[str, Callable[[JsonObject, JsonObject], Iterator[Cause]]] = {
    "Deployment": _workload,
    "ReplicaSet": _workload,
    "StatefulSet": _stateful_set,
    "PersistentVolumeClaim": _claim,
}
