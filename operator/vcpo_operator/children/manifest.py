"""Manifests as values: kinds, identity, digests, owner references."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vcpo.spec import API_VERSION, KIND, VCPORun
from vcpo_operator.names import (
    HASH_ANNOTATION,
    SCALER_KIND,
    SCALER_PLURAL,
    Role,
    RunKey,
    labels,
)

Manifest = dict[str, Any]
_DIGEST_CHARACTERS = 16


class Kind(Enum):
    """Kinds of children: (API version, kind, plural)."""

    CONFIG_MAP = ("v1", "ConfigMap", "configmaps")
    SECRET = ("v1", "Secret", "secrets")
    SERVICE_ACCOUNT = ("v1", "ServiceAccount", "serviceaccounts")
    SERVICE = ("v1", "Service", "services")
    CLAIM = ("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
    STATEFUL_SET = ("apps/v1", "StatefulSet", "statefulsets")
    DEPLOYMENT = ("apps/v1", "Deployment", "deployments")
    SCALER = (API_VERSION, SCALER_KIND, SCALER_PLURAL)
    BUDGET = ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
    NETWORK_POLICY = ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
    POD_MONITOR = ("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")

    @property
    def api_version(self) -> str:
        """Group and version, as manifests write it."""
        return self.value[0]

    @property
    def kind(self) -> str:
        """Kind, as manifests write it."""
        return self.value[1]

    @property
    def plural(self) -> str:
        """Resource, as URLs and roles write it."""
        return self.value[2]

    @property
    def group(self) -> str:
        """API group; empty for the core."""
        return self.api_version.rpartition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """An object that a run wants to exist."""

    kind: Kind
    manifest: Manifest
    """Complete manifest, its own digest among the annotations."""

    @property
    def name(self) -> str:
        """Name of the object."""
        return str(self.manifest["metadata"]["name"])

    @property
    def owner_uid(self) -> str | None:
        """Uid of the run that it goes with; None when it outlives its run."""
        references = self.manifest["metadata"].get("ownerReferences")
        return str(references[0]["uid"]) if references else None

    @property
    def digest(self) -> str:
        """Digest of the manifest."""
        return str(self.manifest["metadata"]["annotations"][HASH_ANNOTATION])


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The run that children belong to."""

    key: RunKey
    uid: str

    def reference(self) -> Manifest:
        """Controlling owner reference: the garbage collector deletes children with the run."""
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
    """What every builder is given: the run and who owns its children."""

    run: VCPORun
    owner: Owner
    run_file: str
    """Text of the file that the run's processes read."""
    credential_uid: str = ""
    """Uid of the Secret with the run's token; another Secret makes new pods."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.owner.key.name


def digest(document: Mapping[str, Any]) -> str:
    """Digest of a document: 16 hexadecimal digits that depend on its content only."""
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
    """Put metadata around a body: labels, owner and the digest of all the rest.

    body: Everything besides `apiVersion`, `kind` and `metadata`.
    owned: False leaves the object behind when the run is deleted.
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
    """The manifest with the digest of all the rest as its only annotation."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "annotations"}
    bare = {**manifest, "metadata": metadata}
    return {**bare, "metadata": {**metadata, "annotations": {HASH_ANNOTATION: digest(bare)}}}
