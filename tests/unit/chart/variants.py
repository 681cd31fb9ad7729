"""Sets of values that between them reach every branch of the templates."""

from __future__ import annotations

from tests.unit.chart.rendering import Values, default_values, leaves, nested

NARROW: Values = {
    "watchNamespaces": ["team-a", "team-b"],
    "crds": {"enabled": False},
    "rbac": {"aggregateToUserRoles": False},
}
"""What somebody without any cluster-wide permission can install."""

EVERYTHING: Values = {
    "images": {
        "registry": "registry.example.com/ml",
        "pullSecrets": [{"name": "registry"}],
        "operator": {"digest": "sha256:" + "a" * 64},
    },
    "replicas": 2,
    "leaderElection": {"enabled": True},
    "runs": {"monitoringNamespaces": ["monitoring", "observability"]},
    "prometheus": {"url": "http://prometheus.monitoring.svc:9090/prefix"},
    "serviceAccount": {"annotations": {"example.com/owner": "ml"}},
    "metrics": {
        "serviceMonitor": {"enabled": True, "additionalLabels": {"release": "prometheus"}},
        "podMonitor": {"enabled": True, "additionalLabels": {"release": "prometheus"}},
    },
    "networkPolicy": {
        "apiServer": {"ports": [6443], "cidrs": ["10.0.0.1/32"]},
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}],
        "extraEgress": [{"ports": [{"port": 9090, "protocol": "TCP"}]}],
    },
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "infra", "operator": "Exists"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "infra", "operator": "Exists"}]}
                ]
            }
        }
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "priorityClassName": "infra",
    "podLabels": {"team": "ml"},
    "podAnnotations": {"example.com/owner": "ml"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "ca", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
}
"""Every optional part at once."""

_COMPANIONS = {"serviceAccount.create": {"serviceAccount": {"create": False, "name": "existing"}}}


def flipped_booleans() -> dict[str, Values]:
    """By path, values that turn one boolean of the defaults over, with what that needs besides."""
    return {
        ".".join(path): _COMPANIONS.get(".".join(path), nested(path, not value))
        for path, value in leaves(default_values())
        if isinstance(value, bool)
    }


def all_variants() -> dict[str, Values]:
    """Every set of values that must render to valid objects, by a name for the report."""
    return {"defaults": {}, "narrow": NARROW, "everything": EVERYTHING, **flipped_booleans()}
