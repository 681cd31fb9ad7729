"""The definition of VCPORolloutScaler: the handle that an autoscaler holds a rollout group by.

The operator makes one for each group with `scaling: External`. `spec.replicas` is a number with a
default, since an autoscaler reads it before anybody wrote it, and `status.selector` is filled in,
since a HorizontalPodAutoscaler refuses a target without one.
"""

from __future__ import annotations

from typing import Any

from vcpo_operator.crd.columns import column
from vcpo_operator.crd.frame import definition, object_schema
from vcpo_operator.names import SCALER_KIND, SCALER_PLURAL

_MAX_REPLICAS = 10_000
_MAX_SELECTOR = 1024


def scaler_crd() -> dict[str, Any]:
    """The CustomResourceDefinition, as the API server takes it."""
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return definition(
        SCALER_KIND,
        SCALER_PLURAL,
        "vscaler",
        subresources={"status": {}, "scale": scale},
        columns=[
            column("Group", "string", ".spec.group", "Rollout group."),
            column("Wanted", "integer", ".spec.replicas", "Workers that the autoscaler asks for."),
            column("Workers", "integer", ".status.replicas", "Workers that there are."),
            column("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
        ],
        schema=_schema(),
    )


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
    return object_schema("The scale of one rollout group, for an autoscaler.", spec, status)
