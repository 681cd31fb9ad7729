"""Manifests of children: kinds, metadata, digests, owner references."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vcpo.api import API_VERSION, KIND, VCPORun
from vcpo_operator.names import HASH_ANNOTATION, PLURAL, Role, RunKey, labels

Manifest = dict[str, Any]
_DIGEST_CHARACTERS = 16


class Kind(Enum):
    """Kinds of a run, its children and its pods: (API version, kind, plural)."""

    CONFIG_MAP = ("v1", "ConfigMap", "configmaps")
    SECRET = ("v1", "Secret", "secrets")
    SERVICE_ACCOUNT = ("v1", "ServiceAccount", "serviceaccounts")
    SERVICE = ("v1", "Service", "services")
    CLAIM = ("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
    STATEFUL_SET = ("apps/v1", "StatefulSet", "statefulsets")
    DEPLOYMENT = ("apps/v1", "Deployment", "deployments")
    BUDGET = ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
    NETWORK_POLICY = ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
    POD = ("v1", "Pod", "pods")
    RUN = (API_VERSION, KIND, PLURAL)
    POD_MONITOR = ("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")

    def __init__(self, api_version: str, kind: str, plural: str) -> None:
        self.api_version, self.kind, self.plural = api_version, kind, plural

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """An object that a run should have."""

    kind: Kind
    manifest: Manifest
    """The complete manifest; its digest is among the annotations."""

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def owner_uid(self) -> str | None:
        references = self.manifest["metadata"].get("ownerReferences")
        return str(references[0]["uid"]) if references else None

    @property
    def digest(self) -> str:
        return str(self.manifest["metadata"]["annotations"][HASH_ANNOTATION])


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The run that owns children."""

    key: RunKey
    uid: str

    def reference(self) -> Manifest:
        """Return the controlling owner reference; the garbage collector follows it."""
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.key.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The input of every builder: a run, and the owner of its children."""

    run: VCPORun
    owner: Owner
    run_file: str
    credential_uid: str = ""
    """Uid of the Secret with the run's keys; with another Secret pods are replaced."""
    generation: int = 0

    @property
    def name(self) -> str:
        return self.owner.key.name


def digest(document: Mapping[str, Any]) -> str:
    """Return the digest of a document: 16 hexadecimal digits of its content."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:_DIGEST_CHARACTERS]


def build_child(
    kind: Kind,
    parent: Parent,
    name: str,
    body: Mapping[str, Any],
    *,
    role: Role | None = None,
    group: str | None = None,
    extra_labels: Mapping[str, str] | None = None,
    owned: bool = True,
) -> Child:
    """Build a child with its metadata: labels, owner and digest.

    body: All fields besides `apiVersion`, `kind` and `metadata`.
    owned: False keeps the object when the run is deleted.
    """
    metadata: Manifest = {
        "name": name,
        "namespace": parent.owner.key.namespace,
        "labels": {**labels(parent.name, role, group), **(extra_labels or {})},
    }
    if owned:
        metadata["ownerReferences"] = [parent.owner.reference()]
    manifest: Manifest = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": metadata,
        **body,
    }
    return Child(kind=kind, manifest=with_digest(manifest))


def with_digest(manifest: Manifest) -> Manifest:
    """Return the manifest with its digest among its annotations."""
    annotations = dict(manifest["metadata"].get("annotations", {}))
    annotations.pop(HASH_ANNOTATION, None)
    bare = {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}
    noted = {**annotations, HASH_ANNOTATION: digest(bare)}
    return {**bare, "metadata": {**bare["metadata"], "annotations": noted}}
