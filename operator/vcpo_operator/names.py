"""Names, labels, annotations and ports that manifests and watches share.

The name of a child joins the names of the run and of the group. A digest follows where the result
is not a valid name, or where two runs or groups could have the same one
(docs/inside/operator-and-workers.md).
"""

import hashlib
import re
from enum import StrEnum
from typing import Final, NamedTuple

GROUP: Final = "vcpo.dev"
VERSION: Final = "v1alpha1"
PLURAL: Final = "vcporuns"

FIELD_MANAGER: Final = "vcpo-operator"
RUN_LABEL: Final = "vcpo.dev/run"
"""Name of the run that a child or pod belongs to; used by selectors and watches."""
ROLE_LABEL: Final = "vcpo.dev/role"
"""A `Role`; part of immutable selectors."""
GROUP_LABEL: Final = "vcpo.dev/group"
"""Rollout group of a Deployment, its pods and its budget; part of immutable selectors."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
POD_INDEX_LABEL: Final = "apps.kubernetes.io/pod-index"
HASH_ANNOTATION: Final = "vcpo.dev/manifest-hash"
"""Digest of the applied manifest; another digest means that the desired state has changed."""
ADOPT_ANNOTATION: Final = "vcpo.dev/adopt"
"""`true` on an object without an owner allows the run to take it over."""
TEMPLATE_HASH_ANNOTATION: Final = "vcpo.dev/template-hash"
"""Digest of its template, on a pod; distinguishes pods of an older template."""
REVISION_ANNOTATION: Final = "vcpo.dev/revision"
"""What the run's pods are made of, on its ConfigMap (`children.revision`)."""
DELETION_COST_ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
"""A ReplicaSet removes pods of the lowest cost first. Here: trajectories in flight."""

LEARNER_PORT: Final = 7600
LEARNER_METRICS_PORT: Final = 7601
RENDEZVOUS_PORT: Final = 29_500
"""Port of the learner's first pod where the ranks meet; torchrun's default."""
LEARNER_HEALTH_PORT: Final = 7602
"""Port of probes, which know no TLS."""
LEARNER_WEIGHTS_PORT: Final = 7620
"""Port of the process that sends weights; a further rank of the pod adds its number there. Behind
the ports of them all come those where the further ranks themselves send weights if need be."""
ROLLOUT_PORT: Final = 7610
ROLLOUT_METRICS_PORT: Final = 7611
ROLLOUT_HEALTH_PORT: Final = 7612

RUN_FILE: Final = "run.yaml"


class Role(StrEnum):
    """What a pod does for its run; also the name of its container."""

    LEARNER = "learner"
    ROLLOUT = "rollout"


class RunKey(NamedTuple):
    """Identity of a run in the cluster; also the key of the work queue."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


_HOST_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DIGEST_LETTERS = "bcdfghjklmnpqrst"
"""One letter for each hexadecimal digit; no vowels, so that no word or date looks like a digest."""
_DIGEST = re.compile(rf"-[{_DIGEST_LETTERS}]{{8}}$")
_LONGEST_BASE = 40
"""Length that leaves room for the suffixes of pods and revisions in a label's 63 characters."""


def base_name(run: str) -> str:
    """Return the first part of the names of a run's children; no two runs have the same.

    It is the run's name if that is a valid host name. A name with dots, one that starts with a
    digit and one that ends like a digest get a digest; dots become dashes.
    """
    if _HOST_NAME.fullmatch(run) and not _DIGEST.search(run):
        return run
    spelt = run.replace(".", "-")
    letter_first = spelt if spelt[0].isalpha() else f"run-{spelt}"
    room = _LONGEST_BASE - len(_digest_of(run))
    return letter_first[:room].rstrip("-") + _digest_of(run)


def learner_name(run: str) -> str:
    """Return the name of the learner's StatefulSet, Service, claim and budget."""
    return f"{base_name(run)}-learner"


def ranks_name(run: str) -> str:
    """Return the name of the Service that gives each of the learner's pods a host name."""
    return f"{learner_name(run)}-ranks"


def rollout_name(run: str, group: str) -> str:
    """Return the name of a rollout group's Deployment and budget.

    It gets a digest where another run's group or learner could have the same name: group
    `b-rollout-c` of run `a`, and group `c` of run `a-rollout-b`.
    """
    name = f"{base_name(run)}-rollout-{group}"
    readings = len(re.findall("(?=-rollout-)", name))
    if readings == 1 and not name.endswith("-learner") and not _DIGEST.search(name):
        return name
    return name + _digest_of(f"{run}/{group}")


def config_name(run: str) -> str:
    """Return the name of the ConfigMap with the run file."""
    return f"{base_name(run)}-config"


def credential_name(run: str) -> str:
    """Return the name of the Secret with the keys that the operator makes for the run."""
    return f"{base_name(run)}-keys"


def certificates_name(run: str) -> str:
    """Return the name of the Secret with the certificates that the operator makes for the run."""
    return f"{base_name(run)}-tls"


def certificate_hosts(key: RunKey) -> dict[str, list[str]]:
    """Return the names in the certificates of each role's pods."""
    learner = learner_name(key.name)
    hosts = [learner, f"{learner}.{key.namespace}", learner_host(key), f"*.{ranks_host(key)}"]
    return {Role.LEARNER.value: hosts, Role.ROLLOUT.value: [f"{base_name(key.name)}-rollout"]}


def account_name(run: str) -> str:
    """Return the name of the ServiceAccount of the run's pods."""
    return f"{base_name(run)}-workload"


def learner_host(key: RunKey) -> str:
    """Return the host name of a run's learner in every namespace."""
    return f"{learner_name(key.name)}.{key.namespace}.svc"


def ranks_host(key: RunKey) -> str:
    """Return what follows the name of a learner's pod in its host name, if there are several."""
    return f"{ranks_name(key.name)}.{key.namespace}.svc"


def learner_address(key: RunKey) -> str:
    """Return the address of a run's learner for gRPC calls inside the cluster: `host:port`."""
    return f"{learner_host(key)}:{LEARNER_PORT}"


def labels(run: str, role: Role | None = None, group: str | None = None) -> dict[str, str]:
    """Return the labels of a child: those that Kubernetes recommends, and the operator's own."""
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


def leader_selector(run: str) -> dict[str, str]:
    """Return the labels of the learner's first pod, in which rank 0 serves."""
    return {**selector(run, Role.LEARNER), POD_INDEX_LABEL: "0"}


def selector(run: str, role: Role | None = None, group: str | None = None) -> dict[str, str]:
    """Return the immutable labels among `labels`, for selectors."""
    chosen = {RUN_LABEL: run}
    if role is not None:
        chosen[ROLE_LABEL] = role.value
    if group is not None:
        chosen[GROUP_LABEL] = group
    return chosen


def _digest_of(text: str) -> str:
    digits = hashlib.sha256(text.encode()).hexdigest()[:8]
    return "-" + "".join(_DIGEST_LETTERS[int(digit, 16)] for digit in digits)
