"""What both definitions have in common: group, version, and the frame of an object's schema."""

from __future__ import annotations

from typing import Any

from vcpo_operator.names import GROUP, VERSION


def definition(
    kind: str,
    plural: str,
    short_name: str,
    *,
    subresources: dict[str, Any],
    columns: list[dict[str, Any]],
    schema: dict[str, Any],
) -> dict[str, Any]:
    """A CustomResourceDefinition with one version, as the API server takes it."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": subresources,
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short_name],
                "categories": ["vcpo"],
            },
            "versions": [version],
        },
    }


def object_schema(description: str, spec: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object whose spec is required."""
    return {
        "type": "object",
        "description": description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this format."},
            "kind": {"type": "string", "description": "Kind of this object."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }
