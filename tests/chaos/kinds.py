"""The kinds of faults."""

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

    WRONG_WEIGHTS = "weights_bit_flipped"

    RENEWED = "certificate_renewed"
    UNREADABLE = "certificate_unreadable"
    EXPIRED = "certificate_expired"
    OTHER_AUTHORITY = "certificate_other_authority"

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
    ROLLED_BACK = "learner_rolled_back"

    SERVER_KILLED = "weight_server_killed"

    CLOCK_BACK = "clock_set_back"
    CLOCK_FORTH = "clock_set_forth"
    CLOCK_JUMPING = "clock_jumping"

    DISK_FULL = "disk_full"
    DISK_READ_ONLY = "disk_read_only"
    DISK_READ_ONLY_AT_START = "disk_read_only_at_start"
    LOG_DAMAGED = "log_damaged"
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    JOURNAL_TORN = "journal_torn"


SHORT: Final = frozenset(
    {
        *(Kind.DELAYED, Kind.THROTTLED, Kind.CORRUPTED, Kind.SWALLOWED, Kind.TORN, Kind.CUT),
        *(Kind.RENEWED, Kind.WRONG_WEIGHTS, Kind.CLOCK_BACK, Kind.CLOCK_FORTH),
        *(Kind.JOURNAL_TORN, Kind.WORKER_KILLED_AT_SUBMIT, Kind.LEARNER_KILLED_AT_COMMIT),
        Kind.ROLLED_BACK,
    }
)
"""Kinds of which each takes a second or two, and one restart of a learner and of a worker."""
ON_OWN_DISK: Final = frozenset({kind for kind in Kind if kind.startswith("disk_")})
"""Kinds that need a disk that nothing else uses."""
