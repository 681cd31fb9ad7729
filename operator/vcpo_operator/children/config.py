"""The ConfigMap with the run file that all pods read.

It holds only the fields that processes read. Fields for the operator alone stand at their defaults:
scaling a group or changing a deadline must not restart the learner. Defaults that depend on GPUs
are decided here, where pod templates are known.
"""

from __future__ import annotations

from typing import Any

from vcpo.api import GpuUse, VCPORun, VCPORunSpec, run_to_yaml, with_gpu_defaults
from vcpo_operator.children.manifest import Child, Kind, Owner, Parent, build_child
from vcpo_operator.names import RUN_FILE, config_name

_HOST_FIELDS = (
    "active_deadline_seconds",
    "control",
    "failure_policy",
    "pending_deadline_seconds",
    "pods",
    "startup_deadline_seconds",
    "suspend",
    "ttl_seconds_after_finished",
    "upgrade_policy",
)
_HOST_LEARNER_FIELDS = (
    "checkpoint_storage_class_name",
    "checkpoint_storage_gibibytes",
    "checkpoint_storage_retention",
    "drain_seconds",
    "image",
    "template",
)
_HOST_GROUP_FIELDS = (
    "drain_seconds",
    "gpus",
    "image",
    "max_replicas",
    "min_replicas",
    "template",
)


def fields_of_pods(spec: VCPORunSpec) -> dict[str, Any]:
    """Return the fields of a spec on which its pods may depend, as JSON."""
    bounds = {"min_replicas", "max_replicas"}
    host = {name: True for name in _HOST_FIELDS if name != "pods"}
    excluded: dict[str, Any] = {**host, "rollouts": {"__all__": bounds}}
    return spec.model_dump(mode="json", by_alias=True, exclude=excluded)


def run_file(run: VCPORun) -> str:
    """Return the YAML of a run for its pods; fields for the host alone stand at their defaults."""
    spec = with_gpu_defaults(run.spec, GpuUse.from_spec(run.spec))
    learner = spec.learner.model_copy(update=_defaults(spec.learner, _HOST_LEARNER_FIELDS))
    groups = tuple(
        group.model_copy(update=_defaults(group, _HOST_GROUP_FIELDS)) for group in spec.rollouts
    )
    kept = spec.model_copy(
        update={**_defaults(spec, _HOST_FIELDS), "learner": learner, "rollouts": groups}
    )
    # Labels and annotations of the object may change at any time, and no process reads them.
    metadata = run.metadata.model_copy(update={"labels": {}, "annotations": {}})
    file = run.model_copy(update={"metadata": metadata, "spec": kept})
    return run_to_yaml(file if run.start_date is None else file.begun_on(run.start_date))


def make_parent(run: VCPORun, owner: Owner) -> Parent:
    """Return a run as the builders of its children take it."""
    return Parent(run=run, owner=owner, run_file=run_file(run))


def run_config_map(parent: Parent) -> Child:
    """Build the ConfigMap."""
    body = {"data": {RUN_FILE: parent.run_file}}
    return build_child(Kind.CONFIG_MAP, parent, config_name(parent.name), body)


def _defaults(section: Any, names: tuple[str, ...]) -> dict[str, Any]:
    fields = type(section).model_fields
    return {name: fields[name].get_default(call_default_factory=True) for name in names}
