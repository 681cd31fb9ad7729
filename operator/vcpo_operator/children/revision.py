"""A revision: all that a run's pods are made of, and the user's part of it.

An upgraded operator builds other pods from the same spec: images, arguments, variables, defaults in
the run file. A run keeps its revision until it may change, so the operator has to know the one in
force. It is written on the learner's StatefulSet, whose pods are of it. Run file and templates
belong together: an old image could not read a new file, and workers speak the learner's protocol.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from vcpo_operator.children.config import pod_fields
from vcpo_operator.children.manifest import Child, Kind, Manifest, Parent, digest, with_digest
from vcpo_operator.names import (
    REVISION_ANNOTATION,
    RUN_FILE,
    TEMPLATE_HASH_ANNOTATION,
    learner_name,
)

_WORKLOADS: Final = (Kind.STATEFUL_SET, Kind.DEPLOYMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """What the pods of a run are made of."""

    fields: Mapping[str, Any]
    """The spec's fields on which they depend (`pod_fields`)."""
    keys: str
    """Uid of the Secret with the run's keys."""
    run_file: str
    templates: Mapping[str, Manifest]
    """Pod templates by name of the workload."""

    @classmethod
    def of(cls, parent: Parent, children: Iterable[Child]) -> Self | None:
        """Return the revision of newly built children; None if the learner is not among them."""
        templates = {
            child.name: child.manifest["spec"]["template"]
            for child in children
            if child.kind in _WORKLOADS
        }
        if learner_name(parent.name) not in templates:
            return None
        return cls(
            fields=pod_fields(parent.run.spec),
            keys=parent.credential_uid,
            run_file=parent.run_file,
            templates=templates,
        )

    @classmethod
    def from_json(cls, text: str | None) -> Self | None:
        """Read the annotation of a StatefulSet; None if no operator of this version wrote it."""
        try:
            document = json.loads(text or "")
            return cls(**document)
        except (TypeError, ValueError):
            return None

    def to_json(self) -> str:
        """Return the annotation."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def name(self) -> str:
        """A name of what the pods get: of two equal ones it is the same."""
        return digest({"run_file": self.run_file, "templates": dict(self.templates)})[:8]

    @property
    def steps(self) -> int:
        """Optimizer steps that the learner of this revision takes."""
        return int(self.fields.get("steps", 0))

    def template_digest(self, workload: str) -> str:
        """Return the digest that pods of a workload carry."""
        metadata = self.templates[workload]["metadata"]
        return str(metadata["annotations"][TEMPLATE_HASH_ANNOTATION])

    def apply_to(self, child: Child) -> Child:
        """Return a child with this revision's run file or template; others as they are."""
        manifest = child.manifest
        if child.kind is Kind.CONFIG_MAP:
            return _rebuilt(child, {"data": {RUN_FILE: self.run_file}})
        template = self.templates.get(child.name)
        if child.kind not in _WORKLOADS or template is None:
            return child
        changed: Manifest = {"spec": {**manifest["spec"], "template": template}}
        if child.kind is Kind.STATEFUL_SET:
            annotations = {REVISION_ANNOTATION: self.to_json()}
            changed["metadata"] = {**manifest["metadata"], "annotations": annotations}
        return _rebuilt(child, changed)


def _rebuilt(child: Child, changed: Manifest) -> Child:
    return Child(kind=child.kind, manifest=with_digest({**child.manifest, **changed}))


def template_changes(before: Revision, after: Revision) -> Iterator[str]:
    """Yield what differs between the pods of two revisions, as `path: old -> new`."""
    for name, template in after.templates.items():
        old = before.templates.get(name)
        if old is not None and old != template:
            yield from changes(_bare(old), _bare(template), name)
    if before.run_file != after.run_file:
        yield "the defaults in the run file"


def changes(before: Any, after: Any, path: str) -> Iterator[str]:
    """Yield each value that differs between two documents, as `path: old -> new`."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys((*before, *after)):
            yield from changes(before.get(name), after.get(name), f"{path}.{name}")
    elif isinstance(before, list) and isinstance(after, list):
        old, new = _by_name(before), _by_name(after)
        for name in dict.fromkeys((*old, *new)):
            yield from changes(old.get(name), new.get(name), f"{path}[{name}]")
    elif before != after:
        yield f"{path}: {_short(before)} -> {_short(after)}"


def _by_name(items: list[Any]) -> dict[Any, Any]:
    """Return the items of a list by their name, or by their number where one has none."""
    names = [item.get("name") if isinstance(item, Mapping) else None for item in items]
    is_named = None not in names and len(set(names)) == len(names)
    return dict(zip(names if is_named else range(len(items)), items, strict=True))


_LONGEST_VALUE: Final = 60


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _bare(template: Manifest) -> Manifest:
    """Return a template without the digest, which says nothing of what changed."""
    annotations = dict(template["metadata"]["annotations"])
    annotations.pop(TEMPLATE_HASH_ANNOTATION, None)
    return {**template, "metadata": {**template["metadata"], "annotations": annotations}}
