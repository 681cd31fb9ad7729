"""The definition of VCPORunDefaults: the part of a run's schema that a platform team may set."""

from __future__ import annotations

from typing import Any

from vcpo_operator.crd.run import run_crd
from vcpo_operator.crd.structural import Schema
from vcpo_operator.names import DEFAULTS_KIND, DEFAULTS_NAME, DEFAULTS_PLURAL, GROUP, VERSION
from vcpo_operator.observed.run_defaults import FIELDS, IMMUTABLE

_NOT_OF_PARTS = ("default", "required", "x-kubernetes-validations")


def run_defaults_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{DEFAULTS_PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": DEFAULTS_KIND,
                "listKind": f"{DEFAULTS_KIND}List",
                "plural": DEFAULTS_PLURAL,
                "singular": DEFAULTS_KIND.lower(),
                "categories": ["vcpo"],
            },
            "versions": [version],
        },
    }


def _schema() -> Schema:
    run = run_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields = run["properties"]["spec"]["properties"]
    part = {name: _optional(fields[name]) for name in FIELDS}
    del part["pods"]["properties"][IMMUTABLE]
    told = {
        "defaults": "Fields of runs that do not set them, or set them to their built-in default.",
        "locked": "Fields of all runs, whatever they say.",
    }
    parts = {
        name: {"type": "object", "description": text, "properties": part}
        for name, text in told.items()
    }
    return {
        "type": "object",
        "description": "Defaults and locks for runs: in the operator's namespace for all of the"
        " cluster, in another one for that namespace.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this format."},
            "kind": {"type": "string", "description": "Kind of this object."},
            "metadata": {"type": "object"},
            "spec": {
                "type": "object",
                "description": "Parts of the spec of runs.",
                "properties": parts,
            },
        },
        "x-kubernetes-validations": [
            {
                "rule": f"self.metadata.name == '{DEFAULTS_NAME}'",
                "message": f"`metadata.name` must be '{DEFAULTS_NAME}'; a namespace has one",
            }
        ],
    }


def _optional(schema: Schema) -> Schema:
    """Return a schema without defaults, required fields and rules between fields."""
    kept: Schema = {name: value for name, value in schema.items() if name not in _NOT_OF_PARTS}
    if "properties" in kept:
        kept["properties"] = {name: _optional(each) for name, each in kept["properties"].items()}
    return kept
