"""A revision: all that a run's pods are made of, and which edit of the run it is from.

An upgraded operator builds other pods from the same spec: images, arguments, variables, defaults in
the run file. A run keeps its revision until it may change (`decisions.upgrade`), so the operator
has to know the one in force. It is written on the ConfigMap with the run file, which is applied
before the workloads: a change of revision that was interrupted there is finished. Run file and
templates belong together: an old image could not read a new file, and workers speak the learner's
protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final, Self

from vcpo_operator.children.config import fields_of_pods
from vcpo_operator.children.manifest import Child, Kind, Manifest, Parent, digest, with_digest
from vcpo_operator.names import REVISION_ANNOTATION, RUN_FILE, TEMPLATE_HASH_ANNOTATION

_WORKLOADS: Final = (Kind.STATEFUL_SET, Kind.DEPLOYMENT)
_STEPS: Final = re.compile(r"^  steps: \d+$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """What the pods of a run are made of."""

    generation: int
    """Generation of the run's spec."""
    spec: str
    """Digest of the spec but what only the operator reads: an upgrade may change it as well."""
    keys: str
    """Uid of the Secret with the run's keys."""
    steps: int
    """Optimizer steps that the learner takes."""
    base: str
    """Digest of all but the number of steps."""
    run_file: str
    templates: Mapping[str, Manifest]
    """Pod templates by name of the workload."""

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
        """Return the digest that pods of a workload carry; empty if it is not part of this."""
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
