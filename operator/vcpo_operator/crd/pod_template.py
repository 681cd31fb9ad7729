"""The schema of a user's part of a pod template: names, types and choices of Kubernetes' fields.

The API server then refuses a misspelt field, a value of a wrong type and an unknown choice when the
run is applied; the operator would learn of them only when it applies the pods. It goes three levels
deep, to the fields of containers, tolerations and volumes. What is below is open: a whole pod
template, three times, would fill the annotation of a client-side apply. Everything may be null,
which removes a field from the operator's template.

`pod_template.json` has the fields of the newest Kubernetes: `python scripts/render_manifests.py`.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Final

from vcpo_operator.crd.structural import Schema

_FILE: Final = "pod_template.json"
_OPEN: Final = "any"


def pod_template_schema() -> Schema:
    """Return the schema of a part of a PodTemplateSpec."""
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    return _node(json.loads(text))


def _node(fields: Any) -> Schema:
    """Return a schema from its short form.

    fields: `any`, a type, choices as `a|b`, a list with the form of its items, or fields by name.
    """
    if fields == _OPEN:
        return {"x-kubernetes-preserve-unknown-fields": True}
    if isinstance(fields, list):
        (item,) = fields
        items = {name: value for name, value in _node(item).items() if name != "nullable"}
        return {"type": "array", "nullable": True, "items": items}
    if isinstance(fields, dict):
        known = {name: _node(field) for name, field in fields.items()}
        return {"type": "object", "nullable": True, "properties": known}
    if "|" in fields:
        return {"type": "string", "enum": fields.split("|")}
    return {"type": fields, "nullable": True}
