"""Ranks beside a stranger: it reaches their ports, and does not know the run's secret."""

from __future__ import annotations

import ipaddress
import json
import pickle
import socket
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from tests.fixtures.learner.ranks import CONTEXT, end_processes, end_ranks, run_ranks
from vcpo.api.learner import Learner
from vcpo_learner.ranks.authenticity import ForgedMessageError, RanksSecret
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.ranks import LostRankError, join_ranks

_LISTENING = "0A"
_SECONDS = timedelta(seconds=5)


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


def test_the_addresses_of_a_process_are_read_from_the_kernel():
    before = listening_addresses()
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.3", 0)):
        assert listening_addresses() - before == {"0.0.0.0", "127.0.0.3"}


def test_ranks_of_one_machine_listen_on_its_loopback_address_alone():
    found = run_ranks(2, listening_addresses)
    assert found == [{"127.0.0.1"}] * 2  # the store, and the connections of each


def write_keys(environment, keys):
    """What a stranger does: connect and set keys."""
    store = TCPStore("127.0.0.1", environment.port, is_master=False, timeout=_SECONDS)
    for key, value in keys.items():
        store.set(key, value)


def train_beside_a_stranger(environment, learner, stranger_is_done):
    """Two commands on the ranks, once a stranger has written every key that anybody can name."""
    if environment.rank == 2:
        forged = json.dumps({"name": "forged", "fields": {}})
        outcome = json.dumps({"error": "ValueError: forged", "is_torn": False})
        keys = {f"commands/{number}": forged for number in range(1, 9)}
        keys |= {f"commands/{number}/{rank}": outcome for number in range(9) for rank in range(2)}
        keys |= {f"here/{rank}": "" for rank in range(2)} | {"groups/0//cpu//0/0": "forged"}
        write_keys(environment, keys)
        stranger_is_done.set()
        return None
    environment = replace(environment, size=2)
    if environment.rank > 0:  # rank 0 has to open its store before the stranger can reach it
        stranger_is_done.wait(20.0)
    ranks = join_ranks(environment, learner, "cpu")
    commands, seen = Commands(ranks), []
    for name in ("forged", "real"):
        commands.on(name, lambda value, name=name: seen.append((name, value)))
    if ranks.is_leader:
        for value in (1, 2):
            commands.call("real", lambda: None, value=value)
        commands.stop()
    else:
        commands.follow()
    ranks.close()
    return seen


def test_a_stranger_that_writes_the_known_keys_changes_nothing():
    learner = Learner.model_validate({"collectiveTimeoutSeconds": 10})
    ended = end_processes(3, train_beside_a_stranger, learner, CONTEXT.Event())
    assert [each.error for each in ended] == [""] * 3
    assert ended[1].result == [("real", 1), ("real", 2)]


def follow_a_stranger(ranks):
    """Rank 1 plays the stranger as well: it lists the names and writes the next command."""
    commands, obeyed = Commands(ranks), []

    def list_and_forge():
        connection = ranks.communication.store._store.underlying_store
        for name in {key.split("/")[0] for key in connection.list_keys()}:
            connection.set(f"{name}/2", json.dumps({"name": "forged", "fields": {}}))

    commands.on("real", list_and_forge)
    commands.on("forged", lambda: obeyed.append("forged"))
    if ranks.is_leader:
        commands.call("real", lambda: None)
        return obeyed
    with pytest.raises(LostRankError, match="commands/2: 32 bytes that are not signed"):
        commands.follow()
    return obeyed


def test_a_command_that_no_rank_has_signed_is_not_obeyed():
    assert run_ranks(2, follow_a_stranger) == [[], []]


class Program:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def exchange_objects(ranks, path, is_forged):
    if is_forged and ranks.rank == 1:
        distributed_c10d._pickler = pickle.Pickler  # as somebody who has no secret
    gathered = [None, None] if ranks.is_leader else None
    sent = Program(path) if is_forged and ranks.rank == 1 else {"rank": ranks.rank}
    dist.gather_object(sent, gathered)
    return gathered


def test_objects_of_ranks_arrive():
    assert run_ranks(2, lambda ranks: exchange_objects(ranks, None, False)) == [
        [{"rank": 0}, {"rank": 1}],
        None,
    ]


def test_a_pickle_that_no_rank_has_signed_is_not_read(tmp_path):
    path = tmp_path / "written by the pickle"
    ended = end_ranks(2, lambda ranks: exchange_objects(ranks, path, True))
    assert not path.exists()
    assert "that are not signed with the secret of the run" in ended[0].error


@pytest.mark.parametrize("key", [b"", b"another"])
def test_a_sum_holds_for_its_secret_its_place_and_its_data_alone(key):
    secret, other = RanksSecret(key=b"secret"), RanksSecret(key=key)
    signed = secret.sign(b"data", "a/1")
    assert secret.verify(signed, "a/1") == b"data"
    changed = signed[:-1] + b"b"
    for who, what, where in (
        (other, signed, "a/1"),
        (secret, signed, "a/2"),
        (secret, changed, "a/1"),
        (secret, b"data", "a/1"),
        (secret, b"", "a/1"),
    ):
        with pytest.raises(ForgedMessageError, match=where):
            who.verify(what, where)
    assert secret.name("a") not in {other.name("a"), secret.name("b")}
    assert "secret" not in repr(secret).removeprefix("RanksSecret")
