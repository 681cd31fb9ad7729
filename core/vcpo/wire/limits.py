"""Bounds, timeouts and gRPC options of every client and server of the wire."""

MAX_MESSAGE_BYTES = 32 << 20
"""Largest message. The longest trajectory has 12 MiB, and its spans in the worst case as much."""
CHUNK_BYTES = 1 << 20
"""Bytes of weights that are read at a time, so that a reader can be stopped in between."""
MAX_SHARDS = 512
"""Largest number of shards of a version. A manifest describes every tensor of each: 30 MB for a
model of 70 B parameters in that many."""
MAX_TOKENS = 1 << 20
"""Largest number of tokens of a prompt or a response."""
MAX_PARTIAL_TOKENS = 1 << 20
"""Largest number of tokens of the partial responses in one message; 8 bytes each."""
MAX_ROUTE_BYTES = 16 << 20
"""Largest size of the experts of one trajectory's tokens; a worker sends none if they take more."""
MAX_ID_CHARACTERS = 256
"""Largest number of characters of a worker, lease or trajectory id."""
MAX_REWARD_PARTS = 16
MAX_SHOWN_CHARACTERS = 500
"""Longest question or answer that people see of a prompt."""
MAX_WAIT_S = 30.0
"""Longest time for which a server may hold a waiting call open."""
CALL_TIMEOUT_S = 20.0
"""Deadline of an ordinary call; a waiting call adds its wait."""
SILENCE_S = 10.0
"""Time in which a server of weights, and who reads from it, must move some bytes."""
SUBMIT_BYTES = 8 << 20
"""Approximate size above which a submission is split."""

RECONNECT_AFTER_S = 5.0
"""Longest pause between two attempts to connect. gRPC's default grows to two minutes, and workers
would stay away for that long after a learner's restart."""

_BOTH_ENDS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Keepalive detects a dead peer within half a minute, even if nothing is being sent.
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
    # Time for one attempt: the address of a deleted pod does not answer at all.
    ("grpc.min_reconnect_backoff_ms", round(1000 * RECONNECT_AFTER_S)),
    # A learner's new pod has another address; by default gRPC resolves a name twice a minute.
    ("grpc.dns_min_time_between_resolutions_ms", round(1000 * RECONNECT_AFTER_S)),
)

MAX_DEADLINE_S = 3600.0
MAX_CALLS = 8192
"""Concurrent calls of a server; further calls are refused, and their callers repeat them."""
MAX_CALLS_PER_CONNECTION = 128
"""Concurrent calls of one connection; further calls wait at the caller."""
MAX_MESSAGES_READ = 8
"""Messages that a server reads at one time, which bounds their memory; other messages wait."""
MAX_CONTROL_MESSAGES_READ = 2
"""The same for the control service, so that its messages do not wait behind those of workers."""
READ_TIMEOUT_S = 20.0
MAX_WEIGHT_CONNECTIONS = 1024
"""Connections of a server of weights; it closes further ones, and their callers come again."""
IDLE_CONNECTION_S = 300.0
"""Time after which a connection without calls is closed."""
HANDSHAKE_S = 10.0
"""Time for the HTTP/2 handshake of a connection."""
MAX_PROBE_S = 60.0
"""Longest deadline of a health check, which needs no key."""
MAX_PROBES_PER_CONNECTION = 4
"""Health checks at one time of a connection to the port that answers nothing else."""
PROBE_CONNECTION_S = 30.0
"""Time after which that port closes a connection; a kubelet opens one for each probe."""
_PROBE_GRACE_S = 1.0
_MAX_PROBE_CONNECTIONS = 128
_MAX_CONNECTIONS = 8192
_OTHER_FILES = 256
"""Number of files that a process needs besides the connections of its callers."""


def server_options(max_open_files: int) -> list[tuple[str, int]]:
    """Return the gRPC options of every server.

    max_open_files: the process's limit of open files; -1 is no limit.
    """
    spare = max(max_open_files - _OTHER_FILES, max_open_files // 2)
    connections = _MAX_CONNECTIONS if max_open_files < 0 else min(spare, _MAX_CONNECTIONS)
    return [
        *_BOTH_ENDS,
        # By default gRPC shares a port, and two learners on one address would share the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_connection_idle_ms", round(1000 * IDLE_CONNECTION_S)),
        ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_S)),
        # The window for a message that is not read yet stays at 64 KiB; it would grow to 4 MiB.
        ("grpc.http2.bdp_probe", 0),
    ]


def probe_options() -> list[tuple[str, int]]:
    """Return the gRPC options of a server that answers health checks alone.

    They bound the time of a connection, not of a call: a caller that opens no window for the
    answer would hold a call for as long as it likes.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", MAX_PROBES_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", _MAX_PROBE_CONNECTIONS),
        ("grpc.max_connection_idle_ms", round(1000 * PROBE_CONNECTION_S)),
        ("grpc.max_connection_age_ms", round(1000 * PROBE_CONNECTION_S)),
        ("grpc.max_connection_age_grace_ms", round(1000 * _PROBE_GRACE_S)),
        ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_S)),
        ("grpc.http2.bdp_probe", 0),
    ]
