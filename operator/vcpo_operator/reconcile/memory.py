"""What the reconciler keeps of a run between two looks, for speed; losing it loses nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Final

from vcpo.control import ControlState
from vcpo.spec import API_VERSION, KIND, VCPORun
from vcpo_operator.children.config import make_parent
from vcpo_operator.children.manifest import Kind, Owner, Parent
from vcpo_operator.decisions.actions import Action, Apply, DeleteChild, IssueToken
from vcpo_operator.decisions.conflicts import Conflict
from vcpo_operator.decisions.plan import DesiredState
from vcpo_operator.decisions.status_model import RunStatus
from vcpo_operator.names import credential_name
from vcpo_operator.observed.records import Cause, ObservedChild, ObservedState, RunRecord

_LOGGER = logging.getLogger(__name__)
UNWATCHED: Final = (Kind.POD_MONITOR, Kind.SECRET)
"""Kinds that are read now and then: the kind of PodMonitors need not exist, and who may watch
Secrets may read everybody's."""


REFUSED_S: Final = 300.0
"""Time until a manifest that the API server calls invalid is applied again as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A manifest that the API server calls invalid."""

    sentence: str
    was_new: bool
    """Whether there was no such object: what cannot be changed may be made, once it is deleted."""
    until_s: float
    """Unix time before which it is not applied again."""


@dataclass(slots=True, kw_only=True)
class RunMemory:
    """What is kept of one run; made anew when its uid changes."""

    uid: str
    first_seen_s: float
    """Unix time of this process's first look at the run."""
    generation: int = -1
    run: VCPORun | None = None
    parent: Parent | None = None
    control: ControlState | None = None
    applied: dict[str, int] = field(default_factory=dict)
    made: dict[tuple[Kind, str], str] = field(default_factory=dict)
    """Uids of the run's children as they were seen or made last."""
    refused: dict[str, Refusal] = field(default_factory=dict)
    """By digest of the manifest."""
    unwatched: dict[tuple[Kind, str], ObservedChild] = field(default_factory=dict)
    read_s: float | None = None
    token_conflict: Conflict | None = None
    """Why the Secret with the token could not be read last; None when it could."""
    status: RunStatus | None = None
    status_version: int = 0
    written_s: float = 0.0
    unexplained_s: float | None = None
    """Since when something does not get on for no known reason; None while nothing does."""
    events_read_s: float | None = None
    causes: dict[str, Cause] = field(default_factory=dict)
    """What events gave as reasons, by uid of what they are about."""


def note(memory: RunMemory, action: Action, applied: ObservedChild | None) -> None:
    """Keep what an action that was carried out has changed and no watch tells."""
    if isinstance(action, Apply):
        memory.refused.pop(action.child.digest, None)
    if isinstance(action, Apply | IssueToken) and action.child.kind in UNWATCHED:
        remember(memory, action.child.kind, action.child.name, applied)
    if isinstance(action, DeleteChild):
        memory.made.pop((action.kind, action.name), None)
    if isinstance(action, DeleteChild) and action.kind in UNWATCHED:
        remember(memory, action.kind, action.name, None)


def is_recreated(memory: RunMemory, applied: ObservedChild) -> bool:
    """Whether what was applied replaces a child that was there, and that we did not delete."""
    before = memory.made.get((applied.kind, applied.name))
    memory.made[applied.kind, applied.name] = applied.uid
    return before not in {None, applied.uid}


def is_refused(memory: RunMemory, action: Apply, now_s: float) -> bool:
    """Whether the API server has called this very manifest invalid, not long ago."""
    known = memory.refused.get(action.child.digest)
    if known is None or known.was_new is action.force:
        return False
    return now_s < known.until_s


def refuse(memory: RunMemory, action: Apply, why: str, now_s: float) -> None:
    """Keep that the API server calls a manifest invalid."""
    refusal = Refusal(sentence=why, was_new=not action.force, until_s=now_s + REFUSED_S)
    memory.refused[action.child.digest] = refusal


def refusal_of(memory: RunMemory, wish: DesiredState) -> str:
    """What the API server says of manifests that are wanted now; empty when it took them all."""
    wanted = {child.digest for child in (*wish.children, *wish.paused.values())}
    memory.refused = {key: each for key, each in memory.refused.items() if key in wanted}
    return "; ".join(dict.fromkeys(each.sentence for each in memory.refused.values()))


def remember(memory: RunMemory, kind: Kind, name: str, child: ObservedChild | None) -> None:
    """Keep what was read of a child that no watch tells of; None: there is none."""
    memory.unwatched.pop((kind, name), None)
    if child is not None:
        memory.unwatched[kind, name] = child


def with_unwatched(observed: ObservedState, memory: RunMemory) -> ObservedState:
    """What is there, with what is known of the kinds that no watch tells of."""
    watched = (each for each in observed.children if each.kind not in UNWATCHED)
    return replace(observed, children=(*memory.unwatched.values(), *watched))


def validated_run(record: RunRecord, memory: RunMemory) -> VCPORun:
    """The run, checked; once for each generation.

    Raises: ValidationError.
    """
    if memory.run is None or memory.generation != record.generation:
        document = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": record.key.name, "namespace": record.key.namespace},
            "spec": dict(record.spec),
        }
        memory.run, memory.parent = VCPORun.model_validate(document), None
        memory.generation = record.generation
    return memory.run


def parent_of(record: RunRecord, run: VCPORun, memory: RunMemory) -> Parent:
    """The run as builders want it; made once for each generation, since YAML is slow to write."""
    if memory.parent is None:
        owner = Owner(key=record.key, uid=record.uid)
        memory.parent = make_parent(run, owner)
    secret = memory.unwatched.get((Kind.SECRET, credential_name(record.key.name)))
    return replace(memory.parent, credential_uid="" if secret is None else secret.uid)


def known_status(record: RunRecord, memory: RunMemory) -> RunStatus:
    """The newest status: what was written last, until the watch has caught up with it."""
    if memory.status is not None and memory.status_version > record.resource_version:
        return memory.status
    try:
        return RunStatus.from_dict(record.status)
    except ValueError as error:
        _LOGGER.warning("%s: starting from an empty status: %s", record.key, error)
        return RunStatus()
