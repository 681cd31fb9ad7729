"""Small objects that the contract tests are made of."""

from __future__ import annotations

from typing import Any

from tests.kube.errors import JsonObject

_SPEC: JsonObject = {
    "type": "object",
    "required": ["model"],
    "x-kubernetes-validations": [
        {"rule": "self.workers <= 8", "message": "at most 8 workers"},
        {"rule": "self.model == oldSelf.model", "message": "`model` is immutable"},
    ],
    "properties": {
        "model": {"type": "string", "minLength": 1},
        "workers": {"type": "integer", "minimum": 1, "maximum": 64, "default": 1},
        "mode": {"type": "string", "enum": ["slow", "fast"], "default": "fast"},
        "limits": {
            "type": "object",
            "default": {},
            "properties": {"steps": {"type": "integer", "default": 10}},
        },
        "groups": {
            "type": "array",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
            },
        },
        "template": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "note": {"type": "string", "nullable": True},
    },
}

WIDGET_DEFINITION: JsonObject = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "widgets.contract.test"},
    "spec": {
        "group": "contract.test",
        "scope": "Namespaced",
        "names": {"plural": "widgets", "singular": "widget", "kind": "Widget"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.workers",
                        "statusReplicasPath": ".status.workers",
                    },
                },
                "additionalPrinterColumns": [
                    {
                        "name": "Ready",
                        "type": "string",
                        "jsonPath": '.status.conditions[?(@.type=="Ready")].status',
                    },
                    {"name": "Workers", "type": "integer", "jsonPath": ".spec.workers"},
                ],
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "spec": _SPEC,
                            "status": {
                                "type": "object",
                                "x-kubernetes-preserve-unknown-fields": True,
                            },
                        },
                    }
                },
            }
        ],
    },
}


def widget(name: str = "", *, metadata: JsonObject | None = None, **spec: Any) -> JsonObject:
    """A widget of model `m`; further keywords are fields of its spec."""
    return {
        "apiVersion": "contract.test/v1",
        "kind": "Widget",
        "metadata": {**({"name": name} if name else {}), **(metadata or {})},
        "spec": {"model": "m", **spec},
    }


def config_map(name: str, *, metadata: JsonObject | None = None, **data: str) -> JsonObject:
    """A ConfigMap; keywords are its data."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **(metadata or {})},
        "data": data,
    }


def _workload(kind: str, name: str, images: dict[str, str], spec: JsonObject) -> JsonObject:
    containers = [{"name": key, "image": image} for key, image in images.items()]
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": containers}}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"app": name}}, "template": template, **spec},
    }


def deployment(name: str, *, images: dict[str, str] | None = None, **spec: Any) -> JsonObject:
    """A Deployment of one container `main`, unless images names others."""
    return _workload("Deployment", name, images or {"main": "app:1"}, spec)


def stateful_set(name: str, **spec: Any) -> JsonObject:
    """A StatefulSet of one container."""
    return _workload("StatefulSet", name, {"main": "app:1"}, {"serviceName": name, **spec})


def owned_by(owner: JsonObject, **more: bool) -> JsonObject:
    """Metadata that names an owner."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        **more,
    }
    return {"ownerReferences": [reference]}
