"""What the API server refuses: metadata of every kind, and the built-in kinds of this project.

Each check answers causes, and an object is refused with all of them at once.
Source: https://github.com/kubernetes/kubernetes/tree/master/pkg/apis (each `validation.go`)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from tests.fakes.kubernetes.errors import Cause, JsonObject
from tests.fakes.kubernetes.objects.resources import Resource
from tests.fakes.kubernetes.objects.selectors import matches_selector

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KEY_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ANNOTATIONS_LIMIT_BYTES = 256 * 1024
_STATEFUL_SET_MUTABLE = (
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
)
_RBAC_KINDS = ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")


def metadata_causes(resource: Resource, body: JsonObject) -> Iterator[Cause]:
    """Mistakes in names, labels, annotations, owners and finalizers."""
    metadata = body["metadata"]
    name = metadata["name"]
    if resource.kind not in _RBAC_KINDS and not (_SUBDOMAIN.fullmatch(name) and len(name) <= 253):
        yield _invalid("metadata.name", name, "a lowercase RFC 1123 subdomain is required")
    if resource.kind in ("Service", "Namespace") and not _is_label(name):
        yield _invalid("metadata.name", name, "a DNS label of at most 63 characters is required")
    yield from label_causes(metadata.get("labels"), "metadata.labels")
    yield from _annotation_causes(metadata.get("annotations") or {})


def label_causes(labels: Mapping[str, str] | None, field: str) -> Iterator[Cause]:
    """Keys that are not qualified names; values that are too long or have odd characters."""
    for key, value in (labels or {}).items():
        if not _is_qualified(key):
            yield _invalid(field, key, "name part must consist of alphanumeric characters")
        if not isinstance(value, str):
            yield _invalid(f"{field}.{key}", value, "must be a string")
        elif len(value) > 63 or (value and not _KEY_NAME.fullmatch(value)):
            yield _invalid(field, value, "a valid label of at most 63 characters is required")


def _annotation_causes(annotations: Mapping[str, str]) -> Iterator[Cause]:
    for key, value in annotations.items():
        if not _is_qualified(key.lower()):
            yield _invalid("metadata.annotations", key, "must be a qualified name")
        if not isinstance(value, str):
            yield _invalid(f"metadata.annotations.{key}", value, "must be a string")
    size = sum(len(str(k).encode()) + len(str(v).encode()) for k, v in annotations.items())
    if size > _ANNOTATIONS_LIMIT_BYTES:
        message = f"Too long: may not be more than {_ANNOTATIONS_LIMIT_BYTES} bytes"
        yield Cause(field="metadata.annotations", message=message, reason="FieldValueTooLong")


def builtin_causes(kind: str, new: JsonObject, old: JsonObject | None) -> Iterator[Cause]:
    """Mistakes in the spec of a built-in object. old: None when it is being created."""
    check = _BY_KIND.get(kind)
    if check is not None:
        yield from check(new, old or {})


def _workload(new: JsonObject, old: JsonObject) -> Iterator[Cause]:
    spec = new["spec"]
    if not isinstance(spec.get("replicas"), int) or spec["replicas"] < 0:
        yield _invalid("spec.replicas", spec.get("replicas"), "must be an integer >= 0")
    if not spec.get("selector"):
        yield _required("spec.selector")
        return
    labels = (spec["template"].get("metadata") or {}).get("labels") or {}
    if not matches_selector(spec["selector"], labels):
        message = "`selector` does not match template `labels`"
        yield _invalid("spec.template.metadata.labels", labels, message)
    yield from label_causes(labels, "spec.template.metadata.labels")
    yield from _pod_spec(spec["template"]["spec"], "spec.template.spec")
    if old and new["kind"] != "StatefulSet" and old["spec"]["selector"] != spec["selector"]:
        yield _invalid("spec.selector", spec["selector"], "field is immutable")


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


def _pod_spec(spec: JsonObject, field: str) -> Iterator[Cause]:
    containers = spec.get("containers") or []
    if not containers:
        yield _required(f"{field}.containers")
    volumes = {volume["name"] for volume in spec.get("volumes") or ()}
    seen: set[str] = set()
    for group in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(group) or ()):
            yield from _container(container, f"{field}.{group}[{index}]", volumes)
            if container.get("name") in seen:
                message = f"Duplicate value: {json.dumps(container['name'])}"
                place = f"{field}.{group}[{index}].name"
                yield Cause(field=place, message=message, reason="FieldValueDuplicate")
            seen.add(container.get("name", ""))


def _container(container: JsonObject, field: str, volumes: Set[str]) -> Iterator[Cause]:
    if not container.get("name"):
        yield _required(f"{field}.name")
    elif not _is_label(container["name"]):
        yield _invalid(f"{field}.name", container["name"], "a DNS label is required")
    if not container.get("image"):
        yield _required(f"{field}.image")
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        if mount.get("name") not in volumes:
            message = f"Not found: {json.dumps(mount.get('name'))}"
            place = f"{field}.volumeMounts[{index}].name"
            yield Cause(field=place, message=message, reason="FieldValueNotFound")


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


def _invalid(field: str, value: Any, why: str) -> Cause:
    return Cause(field=field, message=f"Invalid value: {json.dumps(value)}: {why}")


def _required(field: str) -> Cause:
    return Cause(field=field, message="Required value", reason="FieldValueRequired")


def _is_label(text: str) -> bool:
    return len(text) <= 63 and _LABEL.fullmatch(text) is not None


def _is_qualified(text: str) -> bool:
    prefix, slash, name = text.rpartition("/")
    if slash and not _SUBDOMAIN.fullmatch(prefix):
        return False
    return len(name) <= 63 and _KEY_NAME.fullmatch(name) is not None


_BY_KIND: dict[str, Callable[[JsonObject, JsonObject], Iterator[Cause]]] = {
    "Deployment": _workload,
    "ReplicaSet": _workload,
    "StatefulSet": _stateful_set,
    "PersistentVolumeClaim": _claim,
}
