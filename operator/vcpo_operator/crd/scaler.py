"""The definition of VCPORolloutScaler: the handle that an autoscaler holds a rollout group by.

The operator makes one for each group with `scaling: External`. `spec.replicas` is a number with a
default, since an autoscaler reads it before anybody wrote it, and `status.selector` is filled in,
since a HorizontalPodAutoscaler refuses a target without one.
"""

from __future__ import annotations

from typing import Any

from vcpo_operator.crd.columns import column
from vcpo_operator.names import GROUP, SCALER_KIND, SCALER_PLURAL, VERSION

_MAX_REPLICAS = 10_000
_MAX_SELECTOR = 1024


def scaler_crd() -> dict[str, Any]:
    """The CustomResourceDefinition, as the API server takes it."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{SCALER_PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": SCALER_KIND,
                "listKind": f"{SCALER_KIND}List",
                "plural": SCALER_PLURAL,
                "singular": SCALER_KIND.lower(),
                "shortNames": ["vscaler"],
                "categories": ["vcpo"],
            },
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            column("Group", "string", ".spec.group", "Rollout group."),
            column("Wanted", "integer", ".spec.replicas", "Workers that the autoscaler asks for."),
            column("Workers", "integer", ".status.replicas", "Workers that there are."),
            column("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
        ],
        "schema": {"openAPIV3Schema": _schema()},
    }


def _schema() -> dict[str, Any]:
    replicas = {"type": "integer", "format": "int32", "minimum": 0, "maximum": _MAX_REPLICAS}
    spec = {
        "type": "object",
        "description": "What an autoscaler asks for.",
        "required": ["group"],
        "properties": {
            "group": {
                "type": "string",
                "description": "Rollout group of the run that this object scales.",
                "maxLength": 63,
                "x-kubernetes-validations": [
                    {"rule": "self == oldSelf", "message": "`group` is immutable"}
                ],
            },
            "replicas": {
                **replicas,
                "description": "Workers asked for; the run's `minReplicas` and `maxReplicas` bound"
                " what is made of it.",
                "default": 1,
            },
        },
    }
    status = {
        "type": "object",
        "description": "What the operator observed.",
        "properties": {
            "replicas": {**replicas, "description": "Workers that there are."},
            "selector": {
                "type": "string",
                "description": "Labels of the workers' pods, as a selector.",
                "maxLength": _MAX_SELECTOR,
            },
        },
    }
    return {
        "type": "object",
        "description": "The scale of one rollout group, for an autoscaler.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this format."},
            "kind": {"type": "string", "description": "Kind of this object."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }
