"""Weights are passed on while they arrive, unless the transfer failed."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import settle
from vcpo.wire.errors import NotFoundError, UnavailableError
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.transport.transfer_buffer import Transfer, TransferCache, TransferKey


def key(version=1, base=None, incarnation="now", shard=0):
    return TransferKey(
        incarnation=incarnation,
        policy_version=version,
        base_policy_version=base,
        shard=shard,
    )


def cache_with(*transfers):
    cache = TransferCache()
    cache.announce(0, transfers)
    return cache


async def read_all(transfer, size=3):
    data = b""
    while len(data) < transfer.total_bytes:
        data += (await transfer.read(len(data), size))[0]
    return data


async def test_a_reader_gets_what_is_there_and_then_what_comes():
    transfer = Transfer(key(), 6)
    transfer.extend(0, b"ab")
    reading = asyncio.create_task(read_all(transfer))
    await settle()
    assert not reading.done()
    transfer.extend(2, b"cdef")
    assert await reading == b"abcdef"


async def test_readers_of_an_abandoned_transfer_receive_an_error():
    transfer = Transfer(key(), 6)
    reading = asyncio.create_task(read_all(transfer))
    await settle()
    transfer.discard()
    with pytest.raises(UnavailableError, match="discarded these weights"):
        await reading


@pytest.mark.parametrize(("offset", "data"), [(1, b"c"), (3, b"c"), (2, b"cdefg")], ids=str)
def test_chunks_that_do_not_follow_are_refused(offset, data):
    transfer = Transfer(key(), 6)
    transfer.extend(0, b"ab")
    with pytest.raises(CorruptWeightsError, match="do not follow 2 of 6"):
        transfer.extend(offset, data)
    assert transfer.num_arrived == 2


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_any_chunks_in_order_make_the_whole(chunks):
    transfer = Transfer(key(), sum(map(len, chunks)))
    for chunk in chunks:
        transfer.extend(transfer.num_arrived, chunk)
    assert transfer.is_complete
    assert transfer.buffer == b"".join(chunks)


async def test_a_version_that_is_not_announced_yet_is_waited_for():
    cache = TransferCache()
    finding = asyncio.create_task(cache.find(key(2, 1), 30))
    await settle()
    delta = Transfer(key(2, 1), 6)
    cache.announce(0, [delta])
    assert await finding is delta


@pytest.mark.parametrize(
    "asked", [key(2, 0), key(1), key(1, 0)], ids=["another delta", "earlier", "earlier delta"]
)
async def test_what_will_not_come_is_not_waited_for(asked):
    cache = cache_with(Transfer(key(2), 60), Transfer(key(2, 1), 6))
    with pytest.raises(NotFoundError, match="not hold these weights; ask the learner"):
        await cache.find(asked, 30)


async def test_what_does_not_come_in_time_is_not_here():
    with pytest.raises(NotFoundError):
        await cache_with(Transfer(key(1), 60)).find(key(2), 0)


async def test_the_version_before_is_passed_on_until_the_next_has_come():
    old, new = Transfer(key(1), 60), Transfer(key(2), 60)
    cache = cache_with(old)
    cache.commit(old)
    cache.announce(0, [new])
    assert await cache.find(key(1), 0) is old
    cache.commit(new)
    assert await cache.find(key(2), 0) is new
    with pytest.raises(NotFoundError):
        await cache.find(key(1), 0)


async def test_a_chain_of_deltas_stays_with_the_version_it_leads_to():
    first, last = Transfer(key(2, 1), 6), Transfer(key(3, 2), 6)
    cache = cache_with(first, last)
    cache.commit(Transfer(key(1), 60))
    assert await cache.find(key(2, 1), 0) is first


async def test_a_version_that_came_to_nothing_is_gone_and_the_one_before_is_not():
    old, new = Transfer(key(1), 60), Transfer(key(2), 60)
    cache = cache_with(old)
    cache.commit(old)
    cache.announce(0, [new])
    cache.discard(0)
    assert await cache.find(key(1), 0) is old
    with pytest.raises(UnavailableError):
        await new.read(0, 1)


async def test_a_full_set_is_found_as_each_version_that_it_was_patched_to():
    whole, delta = Transfer(key(1), 60), Transfer(key(2, 1), 6)
    cache = cache_with(whole)
    cache.commit(whole)
    cache.announce(0, [delta])
    finding = asyncio.create_task(cache.find(key(2), 30))
    await settle()
    assert not finding.done()
    whole.policy_version = 2
    cache.commit(whole)
    assert await finding is whole
    assert await cache.find(key(1), 0) is whole


async def test_a_reader_is_told_of_the_newest_version_in_the_bytes_of_any_sender():
    transfer = Transfer(key(3), 4)
    transfer.extend(0, b"ab", 5)
    transfer.extend(2, b"cd", 4)
    assert await transfer.read(0, 9) == (b"abcd", 5)


async def test_a_spoiled_full_set_is_found_no_more():
    whole, delta = Transfer(key(1), 60), Transfer(key(2, 1), 6)
    cache = cache_with(whole)
    cache.commit(whole)
    cache.announce(0, [delta])
    cache.discard(0, whole)
    with pytest.raises(NotFoundError):
        await cache.find(key(1), 0)
    with pytest.raises(UnavailableError):
        await whole.read(0, 1)


async def test_shards_of_one_version_are_found_each_under_its_number():
    cache = TransferCache()
    first, second = Transfer(key(1), 60), Transfer(key(1, shard=1), 60)
    cache.announce(0, [first])
    cache.announce(1, [second])
    cache.commit(first)
    assert await cache.find(key(1), 0) is first
    assert await cache.find(key(1, shard=1), 0) is second
    cache.discard(1)
    assert await cache.find(key(1), 0) is first
    with pytest.raises(NotFoundError):
        await cache.find(key(1, shard=1), 0)


async def test_who_reads_a_shard_that_is_dropped_gets_an_error():
    cache = TransferCache()
    whole = Transfer(key(1, shard=3), 60)
    cache.announce(3, [whole])
    cache.commit(whole)
    cache.drop(3)
    with pytest.raises(UnavailableError):
        await whole.read(0, 60)
    with pytest.raises(NotFoundError):
        await cache.find(key(1, shard=3), 0)


def test_a_transfer_that_no_memory_holds_is_refused():
    with pytest.raises(
        CorruptWeightsError, match="total_bytes: must fit into memory, got 18446744073709551615"
    ):
        Transfer(key(), (1 << 64) - 1)
