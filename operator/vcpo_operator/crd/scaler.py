"""The definition of VCPORolloutScaler, the object that an autoscaler scales for a rollout group.

The operator creates one for each group with `scaling: External`. `spec.replicas` has a default,
since an autoscaler may read it before anybody has written it. The operator sets `status.selector`,
since a HorizontalPodAutoscaler refuses a target without one.
"""

from __future__ import annotations

from typing import Any

from vcpo_operator.crd.frame import column, custom_resource_definition, object_schema
from vcpo_operator.names import SCALER_KIND, SCALER_PLURAL

_MAX_REPLICAS = 10_000
_MAX_SELECTOR = 1024


def scaler_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return custom_resource_definition(
        SCALER_KIND,
        SCALER_PLURAL,
        "vscaler",
        subresources={"status": {}, "scale": scale},
        columns=[
            column("Group", "string", ".spec.group", "Rollout group."),
            column("Wanted", "integer", ".spec.replicas", "Workers that the autoscaler requests."),
            column("Workers", "integer", ".status.replicas", "Workers that exist."),
            column("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
        ],
        schema=_schema(),
    )


def _schema() -> dict[str, Any]:
    replicas = {"type": "integer", "format": "int32", "minimum": 0, "maximum": _MAX_REPLICAS}
    spec = {
        "type": "object",
        "description": "What an autoscaler requests.",
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
                "description": "Number of workers requested. The operator keeps the number within"
                " the group's `minReplicas` and `maxReplicas`.",
                "default": 1,
            },
        },
    }
    status = {
        "type": "object",
        "description": "What the operator observed.",
        "properties": {
            "replicas": {**replicas, "description": "Workers that exist."},
            "selector": {
                "type": "string",
                "description": "Label selector of the workers' pods.",
                "maxLength": _MAX_SELECTOR,
            },
        },
    }
    return object_schema(
        "The scale of one rollout group, for an external autoscaler.", spec, status
    )
