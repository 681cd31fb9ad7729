"""A revision: all that a run's pods are made of, and which edit of the run it is from.

An upgraded operator builds other pods from the same spec: images, arguments, variables, defaults in
the run file. A run keeps its revision until it may change (`decisions.upgrade`), so the operator
has to know the one in force. It is written on the ConfigMap with the run file, which is applied
before the workloads: a change of revision that was interrupted there is finished. Run file and
templates belong together: an old image could not read a new file, and workers speak the learner's
protocol.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from vcpo.api import GpuUse, VCPORun, VCPORunSpec, run_to_yaml, with_gpu_defaults
from vcpo_operator.children.manifest import (
    Child,
    Kind,
    Manifest,
    Owner,
    Parent,
    build_child,
    digest,
    with_digest,
)
from vcpo_operator.names import REVISION_ANNOTATION, RUN_FILE, TEMPLATE_HASH_ANNOTATION, config_name

_HOST_FIELDS = (
    *("active_deadline_seconds", "pending_deadline_seconds", "startup_deadline_seconds"),
    *("control", "failure_policy", "pods", "suspend"),
    *("ttl_seconds_after_finished", "upgrade_policy"),
)
_HOST_LEARNER_FIELDS = (
    *(f"checkpoint_storage_{name}" for name in ("class_name", "gibibytes", "retention")),
    *("drain_seconds", "image", "template"),
)
_HOST_GROUP_FIELDS = ("drain_seconds", "gpus", "image", "max_replicas", "min_replicas", "template")


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


_WORKLOADS: Final = (Kind.STATEFUL_SET, Kind.DEPLOYMENT)
_STEPS: Final = re.compile(r"^  steps: \d+$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """What the pods of a run are made of."""

    generation: int
    spec: str
    """Digest of the spec but what only the operator reads: an upgrade may change it as well."""
    keys: str
    steps: int
    base: str
    """Digest of all but the number of steps."""
    run_file: str
    templates: Mapping[str, Manifest]

    @classmethod
    def of(cls, parent: Parent, children: Iterable[Child]) -> Self:
        """Return the revision of newly built children."""
        templates = {
            child.name: child.manifest["spec"]["template"]
            for child in children
            if child.kind in _WORKLOADS
        }
        bare = {name: _without_digest(template) for name, template in templates.items()}
        return cls(
            generation=parent.generation,
            spec=digest(fields_of_pods(parent.run.spec)),
            keys=parent.credential_uid,
            steps=parent.run.spec.steps,
            base=digest({"run_file": _STEPS.sub("", parent.run_file), "templates": bare}),
            run_file=parent.run_file,
            templates=templates,
        )

    @classmethod
    def from_json(cls, text: str | None) -> Self | None:
        """Read the annotation of a ConfigMap; None if no operator of this version wrote it."""
        try:
            return cls(**json.loads(text or ""))
        except (TypeError, ValueError):
            return None

    def template_digest(self, workload: str) -> str:
        metadata = self.templates.get(workload, {}).get("metadata", {})
        return str(metadata.get("annotations", {}).get(TEMPLATE_HASH_ANNOTATION, ""))

    def apply_to(self, child: Child) -> Child:
        """Return a child with this revision's run file or template; others as they are."""
        manifest = child.manifest
        template = self.templates.get(child.name)
        changed: Manifest
        if child.kind is Kind.CONFIG_MAP:
            note = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
            metadata = {**manifest["metadata"], "annotations": {REVISION_ANNOTATION: note}}
            changed = {"data": {RUN_FILE: self.run_file}, "metadata": metadata}
        elif child.kind in _WORKLOADS and template is not None:
            changed = {"spec": {**manifest["spec"], "template": template}}
        else:
            return child
        return Child(kind=child.kind, manifest=with_digest({**manifest, **changed}))


def _without_digest(template: Manifest) -> Manifest:
    annotations = dict(template["metadata"]["annotations"])
    annotations.pop(TEMPLATE_HASH_ANNOTATION, None)
    return {**template, "metadata": {**template["metadata"], "annotations": annotations}}
