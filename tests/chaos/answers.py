"""What the product may answer to each kind of fault: what may end, and what may be lost.

All else is a fault of the product: a process that ends though nothing allowed it, and a response
that is gone though no disk was damaged, or though the learner did not say how many are.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tests.chaos.kinds import Kind


class Part(StrEnum):
    """A process of a run."""

    LEARNER = "learner"
    WORKER = "worker"


class Loss(StrEnum):
    """What a fault may take with it."""

    NOTHING = "nothing"
    TOLD = "told"
    """What the learner says that it lost, with the number of responses; no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What may come of one fault."""

    ends: frozenset[Part] = frozenset()
    """Processes that may end, whatever their status."""
    loses: Loss = Loss.NOTHING


_NOTHING: Final = Answer()
_WORKER_ENDS: Final = Answer(ends=frozenset({Part.WORKER}))
_LEARNER_ENDS: Final = Answer(ends=frozenset({Part.LEARNER}))
_ANY_ENDS: Final = Answer(ends=frozenset(Part))
_LOG_IS_DAMAGED: Final = Answer(ends=frozenset({Part.LEARNER}), loses=Loss.TOLD)

ANSWERS: Final[Mapping[Kind, Answer]] = {
    **dict.fromkeys(Kind, _NOTHING),
    Kind.WORKER_KILLED: _WORKER_ENDS,
    Kind.WORKER_KILLED_AT_SWAP: _WORKER_ENDS,
    Kind.WORKER_KILLED_AT_SUBMIT: _WORKER_ENDS,
    Kind.OTHER_AUTHORITY: _WORKER_ENDS,  # the process after it trusts the other one
    Kind.LEARNER_KILLED: _LEARNER_ENDS,
    Kind.LEARNER_KILLED_AT_START: _LEARNER_ENDS,
    Kind.LEARNER_KILLED_AT_STEP: _LEARNER_ENDS,
    Kind.LEARNER_KILLED_AT_COMMIT: _LEARNER_ENDS,
    Kind.LEARNER_KILLED_AT_SAVE: _LEARNER_ENDS,
    Kind.LEARNER_KILLED_AT_PUBLISH: _LEARNER_ENDS,
    Kind.LEARNER_TERMINATED: _ANY_ENDS,  # it tells its workers that the run drains
    Kind.DISK_READ_ONLY_AT_START: _LEARNER_ENDS,
    Kind.CHECKPOINT_DAMAGED: _LEARNER_ENDS,
    Kind.LOG_DAMAGED: _LOG_IS_DAMAGED,
}
RESTARTING: Final = frozenset(kind for kind, answer in ANSWERS.items() if answer.ends)
"""Kinds after which a process starts anew, which takes most of a run's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Damage of the redo log."""

    kind: Kind
    """Of the fault; its answer says whether anything may be lost."""
    at_unix_s: float
    told_changes: int
    """Changes of which the next learner said that they are lost."""


@dataclass(slots=True, kw_only=True)
class Window:
    """The time of one fault: from its injection until the run had recovered."""

    kind: Kind
    begun_s: float
    over_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A process that has ended."""

    name: str
    part: Part
    status: int
    at_s: float


def unexpected_ends(ends: Iterable[End], windows: Sequence[Window]) -> list[str]:
    """Ends of processes that no fault of their time allows."""
    return [
        f"{end.name} ended with {end.status}"
        for end in ends
        if not any(
            window.begun_s <= end.at_s <= window.over_s and end.part in ANSWERS[window.kind].ends
            for window in windows
        )
    ]
