"""A client keeps its connection to the server."""

import re
from pathlib import Path

import pytest

from vcpo.wire.limits import CHANNEL_OPTIONS

ROOT = Path(__file__).parents[3]
CLIENTS = {
    "core/vcpo/local/processes/child.py",
    "core/vcpo/wire/client.py",
}


@pytest.mark.parametrize(
    ("option", "default_ms"),
    [
        ("grpc.initial_reconnect_backoff_ms", 1_000),
        ("grpc.min_reconnect_backoff_ms", 20_000),
        ("grpc.max_reconnect_backoff_ms", 120_000),
        ("grpc.dns_min_time_between_resolutions_ms", 30_000),
    ],
)
def test_who_lost_its_server_asks_for_it_again_within_five_seconds(option, default_ms):
    options = dict(CHANNEL_OPTIONS)
    assert 100 <= options.get(option, default_ms) <= 5_000


def test_channels_are_opened_where_these_bounds_are_set():
    opened = {
        str(path.relative_to(ROOT))
        for part in ("core", "learner_svc", "rollout_svc", "operator", "study")
        for path in (ROOT / part).rglob("*.py")
        if re.search(r"\b(insecure|secure)_channel\(", path.read_text())
    }
    assert opened == CLIENTS
