"""Ranks that meet: where they listen, and whom they name if it does not come."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from tests.fixtures.learner.ranks import end_processes, run_ranks
from vcpo.api.learner import Learner
from vcpo_learner.ranks.ranks import join_ranks

_LISTENING = "0A"


def listening_addresses(_=None):
    """The addresses at which this process listens for TCP."""
    links = [Path(f"/proc/self/fd/{each.name}") for each in Path("/proc/self/fd").iterdir()]
    own = {str(each.readlink()) for each in links if each.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING and f"socket:[{inode}]" in own:
                raw = bytes.fromhex(local.partition(":")[0])
                words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
                found.add(str(ipaddress.ip_address(b"".join(words))))
    return found


def test_ranks_of_one_machine_listen_on_its_loopback_address_alone():
    found = run_ranks(2, listening_addresses)
    assert found == [{"127.0.0.1"}] * 2  # the store, and the connections of each


def test_ranks_that_do_not_come_are_named():
    learner = Learner.model_validate({"collectiveTimeoutSeconds": 1})
    first, _ = end_processes(2, come_alone, learner)
    assert "rank 1 of 2 did not come within 1 s" in first.error


def come_alone(environment, learner):
    if environment.rank == 0:
        join_ranks(environment, learner, "cpu")
