"""Bounds that every client and server of the wire keeps."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message sent or received."""
CHUNK_BYTES = 1 << 20
"""Weights travel in pieces of this size: large enough to be cheap, small enough to resume."""
MAX_TOKENS = 1 << 20
"""Longest prompt or response accepted, in tokens."""
MAX_BEGUN_TOKENS = 1 << 20
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

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH_ENDS,
    # gRPC shares a port by default: two learners on one address would each get some of the calls.
    ("grpc.so_reuseport", 0),
)
"""Options of every server."""
