"""The kinds of faults, and the schedule that a seed gives: which fault, when, with what choices."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """One way in which a run is disturbed."""

    DELAYED = "network_delayed"
    THROTTLED = "network_throttled"
    CORRUPTED = "network_corrupted"
    SWALLOWED = "network_swallowed"
    TORN = "network_torn"
    CUT = "network_cut"
    PARTITIONED = "network_partitioned"
    LEARNER_DEAF = "network_one_way_to_learner"
    LEARNER_MUTE = "network_one_way_to_worker"

    STRANGER = "peer_wrong_key"
    OTHER_ROLE = "peer_wrong_role"
    OTHER_NAME = "peer_others_name"
    OTHER_LEASE = "peer_others_lease"
    REPLAYED = "peer_replayed_submission"
    FUTURE_LABEL = "peer_future_label"
    FOREIGN_TOKENS = "peer_unknown_tokens"
    NOT_A_NUMBER = "peer_reward_not_a_number"
    ABANDONED = "peer_abandoned_lease"
    GARBAGE_BYTES = "peer_garbage_bytes"
    GARBAGE_MESSAGE = "peer_garbage_message"
    OVERSIZE = "peer_oversize_message"
    PLAIN_TEXT = "peer_plain_text"
    WRONG_WEIGHTS = "peer_wrong_weights"

    RENEWED = "certificate_renewed"
    UNREADABLE = "certificate_unreadable"
    EXPIRED = "certificate_expired"
    OTHER_AUTHORITY = "certificate_other_authority"

    API_CONFLICT = "api_conflict_409"
    API_BUSY = "api_busy_429"
    API_BROKEN = "api_broken_500"
    API_REPLY_LOST = "api_reply_lost"
    API_DROPPED = "api_dropped"
    WATCH_EXPIRED = "api_watch_expired_410"
    WATCH_CUT = "api_watch_cut"
    API_RESTARTED = "api_restarted"
    OPERATOR_KILLED = "operator_killed"
    OPERATOR_STOPPED = "operator_stopped"

    WORKER_STOPPED = "worker_stopped"
    LEARNER_STOPPED = "learner_stopped"
    WORKER_KILLED = "worker_killed"
    WORKER_KILLED_AT_SWAP = "worker_killed_at_swap"
    WORKER_KILLED_AT_SUBMIT = "worker_killed_at_submit"
    LEARNER_KILLED = "learner_killed"
    LEARNER_KILLED_AT_START = "learner_killed_at_start"
    LEARNER_KILLED_AT_STEP = "learner_killed_at_step"
    LEARNER_KILLED_AT_COMMIT = "learner_killed_at_commit"
    LEARNER_KILLED_AT_SAVE = "learner_killed_at_save"
    LEARNER_KILLED_AT_PUBLISH = "learner_killed_at_publish"
    LEARNER_TERMINATED = "learner_terminated"

    DISK_FULL = "disk_full"
    DISK_READ_ONLY = "disk_read_only"
    DISK_READ_ONLY_AT_START = "disk_read_only_at_start"
    LOG_DAMAGED = "log_damaged"
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    JOURNAL_TORN = "journal_torn"


RESTARTING: Final = frozenset(
    {kind for kind in Kind if "_killed" in kind} - {Kind.OPERATOR_KILLED}
    | {Kind.LEARNER_TERMINATED, Kind.DISK_READ_ONLY_AT_START}
    | {Kind.LOG_DAMAGED, Kind.CHECKPOINT_DAMAGED}
)
"""Kinds after which a learner or a worker starts anew, which takes most of a run's time."""
SHORT: Final = frozenset(
    {
        *(Kind.DELAYED, Kind.THROTTLED, Kind.CORRUPTED, Kind.SWALLOWED, Kind.TORN, Kind.CUT),
        *(Kind.STRANGER, Kind.OTHER_ROLE, Kind.OTHER_NAME, Kind.OTHER_LEASE, Kind.REPLAYED),
        *(Kind.FUTURE_LABEL, Kind.FOREIGN_TOKENS, Kind.NOT_A_NUMBER, Kind.OVERSIZE),
        *(Kind.GARBAGE_BYTES, Kind.GARBAGE_MESSAGE, Kind.PLAIN_TEXT, Kind.RENEWED),
        *(Kind.API_CONFLICT, Kind.API_BROKEN, Kind.WATCH_EXPIRED, Kind.OPERATOR_KILLED),
        *(Kind.JOURNAL_TORN, Kind.WORKER_KILLED_AT_SUBMIT, Kind.LEARNER_KILLED_AT_COMMIT),
    }
)
"""Kinds of which each takes a second or two, and one restart of a learner and of a worker."""
ON_OWN_DISK: Final = frozenset({kind for kind in Kind if kind.startswith("disk_")})
"""Kinds that need a disk that nothing else uses."""
_WEIGHT_OF_OTHERS: Final = 3
_LONGEST_PAUSE_S: Final = 0.5
_OVERLAPPING: Final = 0.3
"""Share of the faults that do not wait until the run has recovered from the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a schedule."""

    number: int
    kind: Kind
    pause_s: float
    """Time before it."""
    overlaps: bool
    """Whether it comes while the run may still suffer from the one before."""
    seed: int
    """Of the choices that its injection makes."""


def schedule(seed: int, number: int, kinds: Collection[Kind] = tuple(Kind)) -> list[Fault]:
    """So many faults, each kind once or more often where there is room; a seed gives one schedule.

    kinds: those to choose from. Restarts are a third as frequent as the others.
    """
    draw, known = random.Random(seed), sorted(kinds)
    chosen = draw.sample(known, len(known))[:number]
    weights = [1 if kind in RESTARTING else _WEIGHT_OF_OTHERS for kind in known]
    chosen += draw.choices(known, weights, k=number - len(chosen))
    draw.shuffle(chosen)
    return [
        Fault(
            number=position + 1,
            kind=kind,
            pause_s=draw.uniform(0.0, _LONGEST_PAUSE_S),
            overlaps=draw.random() < _OVERLAPPING,
            seed=draw.getrandbits(32),
        )
        for position, kind in enumerate(chosen)
    ]


class NotInjectedError(Exception):
    """A fault could not be injected: what it disturbs was not there. It does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that really happened."""

    what: str
    """What was done to whom, in words."""
    sign: str | None = None
    """How the product had to show it; None if it may pass unnoticed, since nothing was wrong with
    the run."""
    is_shown: bool = True
