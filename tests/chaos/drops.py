"""Judges drops: may this reason drop a response that was confirmed, and is what it says true?

```
dropped (reason) ---> a word of the ledger's own ---> its evidence, from the witnesses
```

An update may leave out what it cannot use: a group that would be too old at its turn, a lease that
ended before all of its responses had come. Nobody drops a whole group that is young enough.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vcpo.records.reasons import DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the spec of the run promises."""

    max_policy_lag_steps: int
    prompts_per_step: int
    group_size: int
    lease_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """One group of responses that the ledger let go of in one change."""

    ids: Sequence[str]
    reason: str
    step: int
    """Steps before the next batch."""
    buffered: Sequence[Sequence[str]]
    """The complete groups that waited, this one among them, in the order of their grants; none
    where groups are not what was dropped."""
    monotonic_s: float
    limit: int | None = None
    """The tighter lag limit that the learner had said; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """A lease."""

    monotonic_s: float
    number: int
    """Responses that it asked for."""
    worker: str


@dataclass(slots=True, kw_only=True)
class Facts:
    """What the witnesses know of responses and leases."""

    oldest_step: Mapping[str, int]
    """The fewest steps behind a version that sampled a token of each response."""
    granted: dict[str, Granted] = field(default_factory=dict)
    """By lease."""
    set_aside: set[str] = field(default_factory=set)
    """Workers that the learner took out of the run."""
    failed: set[str] = field(default_factory=set)
    """Leases whose worker said that the generation failed."""
    broken: set[str] = field(default_factory=set)
    """Responses of batches on which an update raised an error."""


Evidence = Callable[[Drop, Facts, Terms], bool]


def _is_expired(drop: Drop, facts: Facts, terms: Terms) -> bool:
    """The lease's time was over, and some of its responses had not come."""
    lease = facts.granted.get(lease_of(drop.ids[0]))
    if lease is None or drop.monotonic_s - lease.monotonic_s < terms.lease_timeout_s:
        return False
    return _is_incomplete(drop, facts, terms)


def _is_incomplete(drop: Drop, facts: Facts, _: Terms) -> bool:
    """Some responses of the lease had not come."""
    arrived = Counter(lease_of(each) for each in drop.ids)
    return all(
        each in facts.granted and number < facts.granted[each].number
        for each, number in arrived.items()
    )


def _has_failed(drop: Drop, facts: Facts, _: Terms) -> bool:
    return any(lease_of(each) in facts.failed for each in drop.ids)


def _is_late(drop: Drop, facts: Facts, terms: Terms) -> bool:
    return _lag_at_turn(drop, facts, terms.max_policy_lag_steps, terms) > terms.max_policy_lag_steps


def _is_throttled(drop: Drop, facts: Facts, terms: Terms) -> bool:
    if drop.limit is None or not 0 <= drop.limit < terms.max_policy_lag_steps:
        return False
    return _lag_at_turn(drop, facts, drop.limit, terms) > drop.limit


def _lag_at_turn(drop: Drop, facts: Facts, limit: int, terms: Terms) -> int:
    """Age of the group's oldest token when its turn comes, in steps.

    The oldest go first, those of one age by their grants; what is late takes nobody's place.
    """
    if not drop.buffered:
        return drop.step - min(_oldest(each, facts) for each in drop.ids)
    ages = [(min(_oldest(each, facts) for each in group), group) for group in drop.buffered]
    place = 0
    for oldest, group in sorted(ages, key=lambda each: each[0]):
        lag = drop.step + place // terms.prompts_per_step - oldest
        if set(group) & set(drop.ids):
            return lag
        place += lag <= limit
    return 0


def _oldest(each: str, facts: Facts) -> int:
    return facts.oldest_step.get(each, 0)


def _breaks_updates(drop: Drop, facts: Facts, _: Terms) -> bool:
    return any(each in facts.broken for each in drop.ids)


def _is_of_a_worker_set_aside(drop: Drop, facts: Facts, _: Terms) -> bool:
    leases = [facts.granted.get(lease_of(each)) for each in drop.ids]
    return any(each is not None and each.worker in facts.set_aside for each in leases)


def _is_of_given_up_weights(drop: Drop, facts: Facts, _: Terms) -> bool:
    return any(_oldest(each, facts) < drop.step for each in drop.ids)


MAY_DROP: Final[Mapping[DropReason, Evidence | None]] = {
    DropReason.LEASE_EXPIRED: _is_expired,
    DropReason.RELEASED: _is_incomplete,
    DropReason.GENERATION_FAILED: _has_failed,
    DropReason.PROMPT_TOO_LONG: None,  # nothing is sampled for such a prompt
    DropReason.LAG_EXCEEDED: _is_late,
    DropReason.THROTTLED: _is_throttled,
    DropReason.NO_SIGNAL: None,  # the run uses no dynamic sampling
    DropReason.SURPLUS: _is_incomplete,
    DropReason.QUARANTINED: _breaks_updates,
    DropReason.LEARNER_RESTARTED: None,  # a restart keeps what was accepted
    DropReason.WORKER_SET_ASIDE: _is_of_a_worker_set_aside,
    DropReason.ROLLED_BACK: _is_of_given_up_weights,
}
"""Evidence without which a reason drops no confirmed response; None: it never does."""


def complaint(drop: Drop, facts: Facts, terms: Terms) -> str | None:
    """Why responses should not have been dropped; None if they may be."""
    if drop.reason not in set(DropReason):
        return f"dropped under no known reason ({drop.reason!r})"
    evidence = MAY_DROP.get(DropReason(drop.reason))
    if evidence is None:
        return f"{drop.reason} drops nothing that was confirmed"
    if not evidence(drop, facts, terms):
        return f"dropped as {drop.reason} at step {drop.step}, which is not so"
    return None


def lease_of(trajectory_id: str) -> str:
    """The lease under which a response was submitted."""
    return trajectory_id.rpartition("/")[0]


def drops_of(line: Mapping[str, Any], limit: int | None) -> list[Drop]:
    """What a line of the learner's witness says, group by group.

    limit: the tighter lag limit that it said last.
    """
    return [
        Drop(
            ids=ids,
            reason=line["reason"],
            step=line["step"],
            buffered=line["buffered"],
            monotonic_s=line["monotonic_s"],
            limit=limit,
        )
        for ids in line["groups"]
    ]
