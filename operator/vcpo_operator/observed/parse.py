"""Parsing objects of the API server into records, and Secrets into access to a learner. Pure."""

import base64
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vcpo.wire.access.roles import RUN_ROLES, CallerRole, checked_key
from vcpo.wire.access.tls import AUTHORITY_FILE, NOBODY, Trust
from vcpo_operator.children.manifest import Kind
from vcpo_operator.children.revision import Revision
from vcpo_operator.names import (
    ADOPT_ANNOTATION,
    DELETION_COST_ANNOTATION,
    GROUP_LABEL,
    HASH_ANNOTATION,
    POD_INDEX_LABEL,
    REVISION_ANNOTATION,
    ROLE_LABEL,
    TEMPLATE_HASH_ANNOTATION,
    Role,
    RunKey,
    learner_host,
)
from vcpo_operator.observed.pod_causes import container_end, pod_cause, replica_failure
from vcpo_operator.observed.records import (
    ObservedChild,
    ObservedClaim,
    ObservedConfig,
    ObservedGroup,
    ObservedLearner,
    ObservedPod,
    ObservedState,
    RunRecord,
)
from vcpo_operator.observed.status import from_rfc3339

Body = Mapping[str, Any]


def parse_run_record(body: Body) -> RunRecord:
    """Parse a VCPORun."""
    metadata = body["metadata"]
    return RunRecord(
        key=RunKey(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        generation=int(metadata.get("generation", 0)),
        resource_version=int(metadata.get("resourceVersion", 0)),
        deleting="deletionTimestamp" in metadata,
        spec=dict(body.get("spec") or {}),
        status=dict(body.get("status") or {}),
        created=metadata.get("creationTimestamp", ""),
    )


def parse_child(kind: Kind, body: Body) -> ObservedChild:
    """Parse what all children have in common."""
    metadata = body["metadata"]
    owners = metadata.get("ownerReferences") or ()
    controllers = (owner["uid"] for owner in owners if owner.get("controller"))
    annotations = metadata.get("annotations") or {}
    return ObservedChild(
        kind=kind,
        name=metadata["name"],
        uid=metadata["uid"],
        owner_uid=next(controllers, None),
        digest=annotations.get(HASH_ANNOTATION),
        version=int(metadata.get("generation") or metadata.get("resourceVersion") or 0),
        labels=dict(metadata.get("labels") or {}),
        deleting="deletionTimestamp" in metadata,
        adoptable=annotations.get(ADOPT_ANNOTATION) == "true",
    )


def parse_learner(body: Body) -> ObservedLearner:
    """Parse the learner's StatefulSet."""
    spec, status = body["spec"], body.get("status") or {}
    generation = int(body["metadata"].get("generation", 0))
    return ObservedLearner(
        child=parse_child(Kind.STATEFUL_SET, body),
        replicas=int(spec.get("replicas", 1)),
        is_up_to_date=int(status.get("observedGeneration", 0)) >= generation,
    )


def parse_config(body: Body) -> ObservedConfig:
    """Parse the ConfigMap with the run file, which says what the pods are made of."""
    annotations = body["metadata"].get("annotations") or {}
    return ObservedConfig(
        child=parse_child(Kind.CONFIG_MAP, body),
        revision=Revision.from_json(annotations.get(REVISION_ANNOTATION)),
    )


def parse_group(body: Body) -> ObservedGroup:
    """Parse a rollout group's Deployment."""
    status = body.get("status") or {}
    return ObservedGroup(
        child=parse_child(Kind.DEPLOYMENT, body),
        group=(body["metadata"].get("labels") or {}).get(GROUP_LABEL, ""),
        replicas=int(body["spec"].get("replicas", 1)),
        ready=int(status.get("readyReplicas") or 0),
        cause=replica_failure(body),
    )


def parse_claim(body: Body) -> ObservedClaim:
    """Parse the claim for checkpoints and models."""
    return ObservedClaim(
        child=parse_child(Kind.CLAIM, body),
        storage=body["spec"]["resources"]["requests"]["storage"],
        is_bound=(body.get("status") or {}).get("phase") != "Pending",
    )


def parse_pod(body: Body) -> ObservedPod | None:
    """Parse a pod; None when this version does not know its role."""
    metadata = body["metadata"]
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if labels.get(ROLE_LABEL) not in set(Role):
        return None
    status = body.get("status") or {}
    conditions = status.get("conditions") or ()
    containers = status.get("containerStatuses") or ()
    return ObservedPod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=Role(labels[ROLE_LABEL]),
        group=labels.get(GROUP_LABEL),
        template_digest=annotations.get(TEMPLATE_HASH_ANNOTATION),
        ready=any(each["type"] == "Ready" and each["status"] == "True" for each in conditions),
        terminating="deletionTimestamp" in metadata,
        deletion_cost=_integer(annotations.get(DELETION_COST_ANNOTATION)),
        restarts=sum(int(each.get("restartCount", 0)) for each in containers),
        cause=pod_cause(body),
        index=_integer(labels.get(POD_INDEX_LABEL)) or 0,
        last_end=container_end(body, labels[ROLE_LABEL]),
        is_finished=status.get("phase") in {"Failed", "Succeeded"},
        node=(body.get("spec") or {}).get("nodeName"),
        is_gated=bool((body.get("spec") or {}).get("schedulingGates")),
        created_s=from_rfc3339(metadata.get("creationTimestamp")) or 0.0,
        termination_deadline_s=None
        if metadata.get("finalizers") or "deletionTimestamp" not in metadata
        else from_rfc3339(metadata["deletionTimestamp"]),
    )


def collect_observed(
    learners: Iterable[ObservedLearner],
    groups: Iterable[ObservedGroup],
    claims: Iterable[ObservedClaim],
    configs: Iterable[ObservedConfig],
    pods: Iterable[ObservedPod],
    others: Iterable[ObservedChild],
) -> ObservedState:
    """Return the records of one run together, in an order that does not depend on arrival."""
    stateful, files, volumes = list(learners), list(configs), list(claims)
    deployments = sorted(groups, key=lambda each: each.child.name)
    children = [
        *others,
        *(each.child for each in stateful),
        *(each.child for each in deployments),
        *(each.child for each in volumes),
        *(each.child for each in files),
    ]
    return ObservedState(
        children=tuple(sorted(children, key=lambda each: (each.kind.kind, each.name))),
        learner=stateful[0] if stateful else None,
        revision=files[0].revision if files else None,
        claims={each.child.name: each for each in volumes},
        groups={each.group: each for each in deployments},
        pods=tuple(sorted(pods, key=lambda each: each.name)),
    )


def _integer(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


class UnusableKeyError(Exception):
    """The Secret with a run's keys holds one that nobody can show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerAccess:
    """How the operator calls the learner of a run."""

    steering_key: str = ""
    """The key that it shows; empty: none is known."""
    trust: Trust | None = None
    """Whom it trusts; None: it calls in plain text."""


def secret_data(body: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the content of a Secret by key; what is no base 64 is left out."""
    data = {}
    for name, encoded in ((body or {}).get("data") or {}).items():
        with contextlib.suppress(ValueError):
            data[name] = base64.b64decode(encoded)
    return data


def steering_key(data: Mapping[str, bytes]) -> str:
    """Return the key for steering; empty if there is none that a header can carry."""
    with contextlib.suppress(ValueError):
        return _checked_key(data.get(CallerRole.STEERING, b""), "")
    return ""


def check_keys(data: Mapping[str, bytes], secret: str) -> None:
    """Check the keys that a Secret holds; a missing one is the pods' to report."""
    for role in RUN_ROLES:
        try:
            _checked_key(data.get(role, b"-"), f"Secret {secret}, key `{role}`")
        except ValueError as error:
            raise UnusableKeyError(str(error)) from error


def learner_trust(key: RunKey, data: Mapping[str, bytes]) -> Trust:
    """Return whom to trust with a key, by the Secret of the certificates.

    Without an authority that is nobody: a key is never sent to a learner in plain text unless the
    run says so.
    """
    authority = data.get(AUTHORITY_FILE)
    if not authority:
        return NOBODY
    return Trust(authority=authority, server_name=learner_host(key))


def _checked_key(content: bytes, source: str) -> str:
    return checked_key(content.decode("ascii", errors="replace"), source)
