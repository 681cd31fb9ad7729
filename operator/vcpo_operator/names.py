"""Names, labels, annotations and ports: every word that manifests and watchers share.

Names of children are the run's and the group's, joined. Where that is no name for such an object,
or two runs or groups could come to the same one, a digest follows (docs/design/043-names.md).
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import Final, NamedTuple

GROUP: Final = "vcpo.dev"
VERSION: Final = "v1alpha1"
PLURAL: Final = "vcporuns"
SCALER_KIND: Final = "VCPORolloutScaler"
SCALER_PLURAL: Final = "vcporolloutscalers"

OPERATOR_MANAGER: Final = "vcpo.dev/operator"
"""Value of `spec.managedBy` that means this operator; so does leaving it out."""

FIELD_MANAGER: Final = "vcpo-operator"
"""Field manager of everything applied, status included."""

SCALE_MANAGER: Final = "vcpo-autoscaler"
"""Field manager of `spec.replicas` of rollout Deployments; the operator proper never sets it."""

RUN_LABEL: Final = "vcpo.dev/run"
"""Name of the run that a child or pod belongs to; selectors and watches stand on it."""

ROLE_LABEL: Final = "vcpo.dev/role"
"""A `Role`; immutable part of selectors."""

GROUP_LABEL: Final = "vcpo.dev/group"
"""Rollout group of a Deployment, its pods and its budget; immutable part of selectors."""

QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Kueue's LocalQueue for a workload; read when the workload is created."""

HASH_ANNOTATION: Final = "vcpo.dev/manifest-hash"
"""Digest of the manifest that was applied; a differing one means that the wish has changed."""

ADOPT_ANNOTATION: Final = "vcpo.dev/adopt"
"""On an object without an owner: `true` lets the run of its name have it."""

TEMPLATE_HASH_ANNOTATION: Final = "vcpo.dev/template-hash"
"""Digest of a pod template, on the pods: tells pods of an older template from current ones."""

DELETION_COST_ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Which pod a ReplicaSet removes first: the cheapest. Here: trajectories in flight."""

LEARNER_PORT: Final = 7600
LEARNER_METRICS_PORT: Final = 7601
ROLLOUT_PORT: Final = 7610
ROLLOUT_METRICS_PORT: Final = 7611

RUN_FILE: Final = "run.yaml"
"""Key of the ConfigMap, and file name in the pods."""

TOKEN_KEY: Final = "token"  # noqa: S105 - the key's name, not a secret
"""Key of a run's token in its Secret, the operator's or the one that the run names."""


class Role(StrEnum):
    """What a pod does for its run; also its container's name."""

    LEARNER = "learner"
    ROLLOUT = "rollout"


class RunKey(NamedTuple):
    """Identity of a run in the cluster; what is queued."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Show as people write it."""
        return f"{self.namespace}/{self.name}"


_HOST_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DIGEST_LETTERS = "bcdfghjklmnpqrst"
"""One for each hexadecimal digit; without vowels, so that no word or date looks like a digest."""
_DIGEST = re.compile(rf"-[{_DIGEST_LETTERS}]{{8}}$")
_LONGEST_BASE = 40
"""Leaves room for the suffixes of pods and revisions in a label's 63 characters."""


def base_name(run: str) -> str:
    """First part of the names of a run's children: its own name where hosts may have it.

    A name with dots, or one that starts with a digit, is spelt with dashes and gets its digest; so
    does one that ends like a digest. Two runs never have the same one.
    """
    if _HOST_NAME.fullmatch(run) and not _DIGEST.search(run):
        return run
    spelt = run.replace(".", "-")
    letter_first = spelt if spelt[0].isalpha() else f"run-{spelt}"
    room = _LONGEST_BASE - len(_digest_of(run))
    return letter_first[:room].rstrip("-") + _digest_of(run)


def learner_name(run: str) -> str:
    """Name of the learner's StatefulSet, Service, claim and budget."""
    return f"{base_name(run)}-learner"


def rollout_name(run: str, group: str) -> str:
    """Name of a rollout group's Deployment, budget and scaler.

    It gets a digest where it could be read as another run's group or learner: run `a`, group
    `b-rollout-c` and run `a-rollout-b`, group `c`.
    """
    name = f"{base_name(run)}-rollout-{group}"
    readings = len(re.findall("(?=-rollout-)", name))
    if readings == 1 and not name.endswith("-learner") and not _DIGEST.search(name):
        return name
    return name + _digest_of(f"{run}/{group}")


def config_name(run: str) -> str:
    """Name of the ConfigMap with the run file."""
    return f"{base_name(run)}-config"


def credential_name(run: str) -> str:
    """Name of the Secret with the token that the operator makes for the run."""
    return f"{base_name(run)}-token"


def account_name(run: str) -> str:
    """Name of the ServiceAccount of the run's pods."""
    return f"{base_name(run)}-workload"


def learner_address(key: RunKey) -> str:
    """Where a run's learner answers gRPC calls inside the cluster."""
    return f"{learner_name(key.name)}.{key.namespace}.svc:{LEARNER_PORT}"


def labels(run: str, role: Role | None = None, group: str | None = None) -> dict[str, str]:
    """Labels of a child: the recommended ones of Kubernetes and our own."""
    named = {
        "app.kubernetes.io/name": "vcpo",
        "app.kubernetes.io/instance": run,
        "app.kubernetes.io/part-of": "vcpo",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        RUN_LABEL: run,
    }
    if role is not None:
        named |= {"app.kubernetes.io/component": role.value, ROLE_LABEL: role.value}
    if group is not None:
        named[GROUP_LABEL] = group
    return named


def selector(run: str, role: Role | None = None, group: str | None = None) -> dict[str, str]:
    """The immutable labels among `labels`: what selectors may stand on."""
    chosen = {RUN_LABEL: run}
    if role is not None:
        chosen[ROLE_LABEL] = role.value
    if group is not None:
        chosen[GROUP_LABEL] = group
    return chosen


def _digest_of(text: str) -> str:
    digits = hashlib.sha256(text.encode()).hexdigest()[:8]
    return "-" + "".join(_DIGEST_LETTERS[int(digit, 16)] for digit in digits)
