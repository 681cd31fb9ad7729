"""What a run does about trouble: one table, one count, one limit on events.

Of equal troubles the first three are events, then the tenth, the hundredth and so on.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vcpo.api import VCPORunSpec
from vcpo.records.journal import GENERATION_FAILED
from vcpo_learner.clock import Clock

TOLERANCE_S: Final = 600.0
"""How long failures in a row must last before a run that had responses before fails."""
_ALL_TOLD: Final = 3
_MOST_DISTINCT: Final = 256
"""Further distinct troubles count as equal to each other."""


class Trouble(StrEnum):
    """What went wrong."""

    GENERATION = "generation"
    """A worker could not generate a group."""
    PROMPT = "prompt"
    """A prompt does not fit into the model's context."""
    WORKER = "worker"
    """A worker failed a group that it was granted after another one had delivered."""
    BATCH = "batch"
    """No step can be taken on a batch; parameters and optimizer are unchanged."""
    WRITE = "write"
    """A checkpoint or the model could not be written."""


class Answer(StrEnum):
    """What the run does about it."""

    RETRY = "retry"
    DROP = "drop"
    SET_ASIDE = "set aside"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The answer to one kind of trouble, and to a row of them without a success between."""

    event: str
    """Kind of its event."""
    first: Answer
    then: Answer | None = None
    """Answer to `most` in a row, once the row has lasted `lasting_s` seconds."""
    most: int = 1
    lasting_s: float = 0.0


def policies(spec: VCPORunSpec) -> Mapping[Trouble, Policy]:
    """Return the answers of a run."""
    most = spec.failure_policy.max_failures_in_a_row
    failed, end, drop = GENERATION_FAILED, Answer.END, Answer.DROP
    return {
        Trouble.GENERATION: Policy(
            event=failed, first=Answer.RETRY, then=end, most=most, lasting_s=TOLERANCE_S
        ),
        Trouble.PROMPT: Policy(
            event=failed, first=drop, then=end, most=most, lasting_s=TOLERANCE_S
        ),
        Trouble.WORKER: Policy(
            event=failed, first=Answer.RETRY, then=Answer.SET_ASIDE, most=math.ceil(most / 2)
        ),
        Trouble.BATCH: Policy(event="GroupsDropped", first=drop, then=end, most=3),
        Trouble.WRITE: Policy(event="DiskFull", first=Answer.RETRY),
    }


@dataclass(slots=True)
class _Row:
    began_s: float
    number: int = 0


class Troubles:
    """Counts the troubles of a run, tells them, and says what to do. Owner: the event loop."""

    def __init__(self, spec: VCPORunSpec, clock: Clock, event: Callable[[str, str], None]) -> None:
        """event: writes an event of a kind, with a text."""
        self.event = event
        self._policies = policies(spec)
        self._clock = clock
        self._rows: dict[tuple[Trouble, str], _Row] = {}
        self._told: Counter[Hashable] = Counter()

    def report(
        self, kind: Trouble, text: str = "", *, who: str = "", like: Hashable = ""
    ) -> Answer:
        """Count a trouble, tell it if it is due, and return the answer.

        text: of the event; empty: it is told elsewhere.
        who: whose row it belongs to; empty: the run's.
        like: what equal troubles of this kind have in common.
        """
        self._rows.setdefault((kind, who), _Row(self._clock())).number += 1
        if text:
            self.tell(self._policies[kind].event, text, like=(kind, like))
        return self.answer(kind, who)

    def answer(self, kind: Trouble, who: str = "", *, at_once: bool = False) -> Answer:
        """Return the answer to the present row.

        at_once: whether the row need not have lasted.
        """
        policy = self._policies[kind]
        if policy.then is None or self.in_a_row(kind, who) < policy.most:
            return policy.first
        has_lasted = at_once or self.lasting_s(kind, who) >= policy.lasting_s
        return policy.then if has_lasted else policy.first

    def in_a_row(self, kind: Trouble, who: str = "") -> int:
        row = self._rows.get((kind, who))
        return 0 if row is None else row.number

    def lasting_s(self, kind: Trouble, who: str = "") -> float:
        row = self._rows.get((kind, who))
        return 0.0 if row is None else self._clock() - row.began_s

    def end_row(self, *kinds: Trouble, who: str = "") -> None:
        for kind in kinds:
            self._rows.pop((kind, who), None)

    def tell(self, event: str, text: str, *, like: Hashable = "") -> None:
        """Write an event, unless enough like it were written.

        like: what equal events of this kind have in common.
        """
        key: Hashable = (event, like)
        if key not in self._told and len(self._told) >= _MOST_DISTINCT:
            key = "the rest"
        self._told[key] += 1
        if is_told(number := self._told[key]):
            more = f"; {number} times so far" if number > _ALL_TOLD else ""
            self.event(event, f"{text}{more}")


def is_told(number: int) -> bool:
    """Return whether the event of this number among equal ones is told."""
    return number <= _ALL_TOLD or math.log10(number).is_integer()
