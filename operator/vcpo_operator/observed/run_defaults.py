"""Defaults and locks of a platform team (`VCPORunDefaults`), merged into a spec. Pure.

Those in the operator's namespace hold for all runs, those in a run's own for that namespace. What
a run sets wins over defaults, the namespace's over the cluster's; locks win over the run, the
cluster's over the namespace's. The API server fills in the definition's defaults before anybody
sees a run. So a field with that value counts as not set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from vcpo.api import VCPORunSpec
from vcpo_operator.children.pod_template.overlay import merge_template
from vcpo_operator.observed.records import FieldOrigin, RunRecord

FIELDS: Final = (
    "pods",
    "pendingDeadlineSeconds",
    "activeDeadlineSeconds",
    "startupDeadlineSeconds",
    "pullDeadlineSeconds",
    "loadDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "upgradePolicy",
    "cleanupPolicy",
    "failurePolicy",
)
"""Fields of a run's spec that a platform team may set: none changes what the run computes."""
IMMUTABLE: Final = "queueName"
"""The field of `pods` that may not change while a run is there, and so has no default."""
_TEMPLATE: Final = "template"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDefaults:
    """The defaults and locks of one namespace, or of the cluster; parts of a spec."""

    origin: str
    """Where they stand: namespace and name, or a file."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    locked: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Mapping[str, Any], origin: str = "") -> Self:
        """Parse a VCPORunDefaults."""
        spec, metadata = body.get("spec") or {}, body.get("metadata") or {}
        return cls(
            origin=origin or f"{metadata['namespace']}/{metadata['name']}",
            defaults=spec.get("defaults") or {},
            locked=spec.get("locked") or {},
        )


def with_run_defaults(record: RunRecord, layers: Sequence[RunDefaults]) -> RunRecord:
    """Return a run whose spec has the defaults and locks, as `merge_spec`.

    Raises: ValueError.
    """
    if not layers:
        return record
    spec, origins = merge_spec(record.spec, layers)
    return dataclasses.replace(record, spec=spec, own_spec=record.spec, defaults_from=origins)


def merge_spec(
    spec: Mapping[str, Any], layers: Sequence[RunDefaults]
) -> tuple[dict[str, Any], tuple[FieldOrigin, ...]]:
    """Return a spec with defaults and locks, and which fields are not the run's own.

    layers: The cluster's first.
    Raises: ValueError that names what can be no default, or a template that cannot be merged.
    """
    merged, origins = dict(spec), list[FieldOrigin]()
    for how in ("Default", "Locked"):
        for layer in reversed(layers):
            is_lock = how == "Locked"
            part = layer.locked if is_lock else layer.defaults
            try:
                fields = dict(_changes(merged, part, _BUILT_IN, is_lock=is_lock))
            except ValueError as error:
                raise ValueError(f"VCPORunDefaults {layer.origin}: {error}") from error
            for path, value in fields.items():
                merged = _with_value(merged, path, value)
            origins = [
                each for each in origins if each.field not in fields or _is_template(each.field)
            ]
            origins += [FieldOrigin(field=path, origin=layer.origin, how=how) for path in fields]
    return merged, tuple(origins)


def _changes(
    spec: Mapping[str, Any],
    part: Mapping[str, Any],
    built_in: Mapping[str, Any],
    *,
    is_lock: bool,
    path: str = "",
) -> Iterator[tuple[str, Any]]:
    """Yield the fields that a part of a spec changes, by path, with their new values."""
    for name, value in part.items():
        here = f"{path}{name}"
        if name not in built_in:
            raise ValueError(f"`{here}` can have no default here; leave it to the runs")
        usual = built_in[name]
        given = spec.get(name, usual)
        if name == _TEMPLATE:
            ours = merge_template({}, value, keeps_null=True)
            base, patch = (given or {}, ours) if is_lock else (ours, given or {})
            merged = merge_template(base, patch, keeps_null=True)
            if merged != given:
                yield here, merged
        elif isinstance(usual, Mapping):
            inner = given or {}
            yield from _changes(inner, value, usual, is_lock=is_lock, path=f"{here}.")
        elif given != value and (is_lock or given == usual):
            yield here, value


def _with_value(spec: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    below = _with_value(spec.get(name) or {}, rest, value) if rest else value
    return {**spec, name: below}


def _is_template(path: str) -> bool:
    """Whether a field is merged, so that several may have a part in it."""
    return path.rpartition(".")[2] == _TEMPLATE


def _built_in() -> dict[str, Any]:
    least = {"model": {"name": "m"}, "environment": {"name": "countdown"}, "steps": 1}
    spec = VCPORunSpec.model_validate(least).model_dump(mode="json", by_alias=True)
    known: dict[str, Any] = {name: spec[name] for name in FIELDS}
    del known["pods"][IMMUTABLE]
    return known


_BUILT_IN: Final = _built_in()
