"""Bounds that every client and server of the wire keeps."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 32 << 20
"""Largest message sent or received; the longest trajectory takes 12 MiB, and in the worst case its
spans as much again."""
CHUNK_BYTES = 1 << 20
"""Weights travel in pieces of this size: large enough to be cheap, small enough to resume."""
MAX_TOKENS = 1 << 20
"""Longest prompt or response accepted, in tokens."""
MAX_PARTIAL_TOKENS = 1 << 20
"""Tokens of begun answers handed back, or handed out, in one message; 8 bytes each."""
MAX_ID_CHARACTERS = 256
"""Longest worker, lease or trajectory id accepted."""
MAX_WAIT_S = 30.0
"""Longest time a server may hold a waiting call open."""
CALL_TIMEOUT_S = 20.0
"""Deadline of an ordinary call; a waiting call gets its wait on top."""
FETCH_TIMEOUT_S = 600.0
"""Deadline of one attempt to stream a version; a resumed transfer starts a new one."""
SUBMIT_BYTES = 8 << 20
"""A submission grows to about this size before it is split."""

RECONNECT_AFTER_S = 5.0
"""Longest pause between two attempts to connect. gRPC's own grows to two minutes: workers would be
missing for long after a learner that was away for some."""

_BOTH_ENDS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A dead peer is noticed within half a minute even when nothing is being sent.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", round(1000 * RECONNECT_AFTER_S)),
    # Time for one attempt: the address of a pod that is gone does not answer at all.
    ("grpc.min_reconnect_backoff_ms", round(1000 * RECONNECT_AFTER_S)),
    # A learner's new pod has another address; by default its name is looked up twice a minute.
    ("grpc.dns_min_time_between_resolutions_ms", round(1000 * RECONNECT_AFTER_S)),
)
"""Options of every channel."""

MAX_DEADLINE_S = 3600.0
"""Farthest deadline of a call."""
MAX_CALLS = 8192
"""Calls under way at one time; those beyond are refused, and repeated by their callers."""
MAX_CALLS_PER_CONNECTION = 128
"""Of them over one connection; those beyond wait at their caller."""
MAX_MESSAGES_READ = 8
"""Messages that arrive at one time; others wait. That bounds the memory that they take."""
MAX_CONTROL_MESSAGES_READ = 2
"""The same for whoever steers the run: its messages do not wait behind those of workers."""
READ_TIMEOUT_S = 20.0
"""Time for a message to arrive."""
MAX_STREAMS = 64
"""Versions that are sent at one time; callers beyond are refused, and ask again."""
STALLED_READER_S = 30.0
"""Time for the reader of a stream to take a chunk; then it is no longer sent."""
IDLE_CONNECTION_S = 300.0
"""A connection without calls is closed after this time."""
HANDSHAKE_S = 10.0
"""Time for a caller to say that it speaks HTTP/2."""
_MAX_CONNECTIONS = 8192
_OTHER_FILES = 256
"""Files that a process needs for other things than connections."""


def server_options(max_open_files: int) -> list[tuple[str, int]]:
    """Options of every server.

    max_open_files: What the system lets the process have; -1 for any number.
    """
    spare = max(max_open_files - _OTHER_FILES, max_open_files // 2)
    connections = _MAX_CONNECTIONS if max_open_files < 0 else min(spare, _MAX_CONNECTIONS)
    return [
        *_BOTH_ENDS,
        # gRPC shares a port by default: two learners on one address would share the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_connection_idle_ms", round(1000 * IDLE_CONNECTION_S)),
        ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_S)),
        # What arrives of a message that nobody reads yet stays at 64 KiB; it would grow to 4 MiB.
        ("grpc.http2.bdp_probe", 0),
    ]
