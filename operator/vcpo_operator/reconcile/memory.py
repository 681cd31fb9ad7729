"""What the reconciler remembers of a run between two reconciles.

It saves calls. An operator that starts without it applies each child once more and loses nothing.
"""

import contextlib
import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from pydantic import ValidationError

from vcpo.api import API_VERSION, KIND, VCPORun
from vcpo.control.decision import ControlState
from vcpo_operator.children.manifest import Kind, Owner, Parent
from vcpo_operator.children.revision import Revision, make_parent
from vcpo_operator.decisions.conditions import NoUpdate
from vcpo_operator.decisions.conflicts import Conflict
from vcpo_operator.decisions.desired import DesiredState
from vcpo_operator.decisions.plan import Action, Apply, Delete, IssueSecret
from vcpo_operator.names import credential_name
from vcpo_operator.observed.records import ObservedChild, ObservedState, RunRecord
from vcpo_operator.observed.status import RunStatus

_LOGGER = logging.getLogger(__name__)
UNWATCHED: Final = (Kind.POD_MONITOR, Kind.SECRET)
"""Kinds that are read now and then. The kind PodMonitor may not exist in the cluster, and the
right to watch Secrets is the right to read all of them."""

REFUSED_S: Final = 300.0
"""Time until the operator applies a refused manifest again without a change."""


def validated(document: dict[str, Any]) -> tuple[VCPORun, tuple[str, ...]]:
    """Return a run of the API server, and the names of its fields that this version does not know.

    The API server takes only fields of its definition, and fills in their defaults. One that is
    unknown here is of a newer definition, so it is left out. Files stay strict.
    """
    try:
        return VCPORun.model_validate(document), ()
    except ValidationError as error:
        document, unknown = copy.deepcopy(document), []
        for each in error.errors(include_url=False):
            *path, name = each["loc"]
            section: Any = document
            with contextlib.suppress(KeyError, IndexError, TypeError):
                for step in path:
                    section = section[step]
                if each["type"] == "extra_forbidden":
                    del section[name]
                    unknown.append(".".join(map(str, each["loc"])))
        if not unknown:
            raise
    run, more = validated(document)
    return run, (*unknown, *more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A manifest that the API server called invalid."""

    message: str
    was_new: bool
    """Whether the object did not exist. After its deletion an invalid change may be a valid
    creation."""
    until_s: float


@dataclass(slots=True, kw_only=True)
class RunMemory:
    """The memory of one run with one uid. One owner: the reconciler. Times are Unix seconds."""

    uid: str
    first_seen_s: float
    """Unix time at which this process first reconciled the run."""
    control: ControlState | None = None
    applied_versions: dict[str, int] = field(default_factory=dict)
    """Version of each child after this process applied it, by uid of the child."""
    unwatched_read_s: float | None = None
    read_generation: int = 0
    monitor_read_s: float | None = None
    keys_conflict: Conflict | None = None
    """Why the Secret with the keys could not be read last; None when it could."""
    certificates_due: bool = False
    """Whether the run's own certificates that were read last end soon, or could not be used."""
    certificate_end_s: float | None = None
    """Unix time at which the first certificate that was read last ends; None if none was."""
    status: RunStatus | None = None
    status_version: int = 0
    status_written_s: float = 0.0
    applied_revision: Revision | None = None
    """Revision with which this process applied the run file last."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the spec that a newer definition has and this version does not know."""
    no_update: NoUpdate | None = None
    """What was said last of steps without an update; None if nothing is to be said of them."""
    _spec: Mapping[str, Any] | None = None
    _run: VCPORun | None = None
    _parent: Parent | None = None
    _child_uids: dict[tuple[Kind, str], str] = field(default_factory=dict)
    _refusals: dict[str, Refusal] = field(default_factory=dict)
    _unwatched: dict[tuple[Kind, str], ObservedChild] = field(default_factory=dict)

    def validated_run(self, record: RunRecord) -> VCPORun:
        """Return the validated run; each spec is validated once."""
        if self._run is None or self._spec != record.spec:
            document = {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": {"name": record.key.name, "namespace": record.key.namespace},
                "spec": dict(record.spec),
            }
            run, self.unknown_fields = validated(document)
            if record.created:
                run = run.begun_on(datetime.fromisoformat(record.created).date())
            self._run, self._parent = run, None
            self._spec = record.spec
        return self._run

    def parent_of(self, record: RunRecord, run: VCPORun) -> Parent:
        """Return the run as the builders of children take it.

        It is made once for each spec, since writing its YAML is slow.
        """
        if self._parent is None:
            self._parent = make_parent(run, Owner(key=record.key, uid=record.uid))
        secret = self._unwatched.get((Kind.SECRET, credential_name(record.key.name)))
        return replace(
            self._parent,
            credential_uid="" if secret is None else secret.uid,
            generation=record.generation,
        )

    def last_known_status(self, record: RunRecord) -> RunStatus:
        """Return the newest status: the one written last, until the watch has caught up with it."""
        if self.status is not None and self.status_version > record.resource_version:
            return self.status
        try:
            return RunStatus.from_dict(record.status)
        except ValueError as error:
            _LOGGER.warning("%s: starting from an empty status: %s", record.key, error)
            return RunStatus()

    def record_unwatched(self, kind: Kind, name: str, child: ObservedChild | None) -> None:
        """Record a child of an unwatched kind as it was read or written last; None: none exists."""
        self._unwatched.pop((kind, name), None)
        if child is not None:
            self._unwatched[kind, name] = child

    def with_unwatched(self, observed: ObservedState) -> ObservedState:
        watched = (each for each in observed.children if each.kind not in UNWATCHED)
        children = (*self._unwatched.values(), *watched)
        return replace(
            observed,
            children=children,
            certificates_due=self.certificates_due,
            certificate_end_s=self.certificate_end_s,
        )

    def record_child(self, child: ObservedChild) -> bool:
        """Record a child; return whether it replaces one that somebody else deleted."""
        before = self._child_uids.get((child.kind, child.name))
        self._child_uids[child.kind, child.name] = child.uid
        return before not in {None, child.uid}

    def kept_revision(self, observed: ObservedState) -> Revision | None:
        """Return the revision of the pods that the run has; None when it has none.

        What this process applied last is newer than what a watch may show.
        """
        return None if observed.learner is None else self.applied_revision or observed.revision

    def record_action(self, action: Action, applied: ObservedChild | None) -> None:
        """Record what an executed action changed and no watch reports."""
        if isinstance(action, Apply):
            self._refusals.pop(action.child.digest, None)
        if isinstance(action, Apply | IssueSecret) and action.child.kind in UNWATCHED:
            self.record_unwatched(action.child.kind, action.child.name, applied)
        if isinstance(action, IssueSecret):
            self.unwatched_read_s = None  # the connections get what the Secret holds now
            self.certificates_due = False
        if isinstance(action, Delete):
            self._child_uids.pop((action.kind, action.name), None)
            self._unwatched.pop((action.kind, action.name), None)

    def record_refusal(self, action: Apply, message: str, now_s: float) -> None:
        self._refusals[action.child.digest] = Refusal(
            message=message, was_new=not action.force, until_s=now_s + REFUSED_S
        )

    def is_refused(self, action: Apply, now_s: float) -> bool:
        known = self._refusals.get(action.child.digest)
        if known is None or known.was_new is action.force:
            return False
        return now_s < known.until_s

    def refusal_message(self, desired: DesiredState) -> str:
        """Return why manifests of the desired state were refused; empty when none was."""
        wanted = {child.digest for child in desired.children}
        self._refusals = {key: each for key, each in self._refusals.items() if key in wanted}
        return "; ".join(dict.fromkeys(each.message for each in self._refusals.values()))
