"""Weights are passed on while they arrive, unless the transfer failed."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import settle
from vcpo.wire.errors import NotFoundError, UnavailableError
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.transport.transfer_buffer import Transfer, TransferCache, TransferKey


def key(version=1, base=None, incarnation="now"):
    return TransferKey(incarnation=incarnation, policy_version=version, base_policy_version=base)


def cache_with(*transfers):
    cache = TransferCache()
    cache.announce(transfers[0], transfers[1:])
    return cache


async def read_all(transfer, size=3):
    data = b""
    while some := await transfer.read(len(data), size):
        data += some
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
    assert transfer.content() == b"".join(chunks)


async def test_a_version_that_is_not_announced_yet_is_waited_for():
    cache = TransferCache()
    finding = asyncio.create_task(cache.find(key(2, 1), 30))
    await settle()
    delta = Transfer(key(2, 1), 6)
    cache.announce(Transfer(key(2), 60), [delta])
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
    cache.announce(new, [])
    assert await cache.find(key(1), 0) is old
    cache.commit()
    assert await cache.find(key(2), 0) is new
    with pytest.raises(NotFoundError):
        await cache.find(key(1), 0)


async def test_a_chain_of_deltas_stays_with_the_version_it_leads_to():
    first, last = Transfer(key(2, 1), 6), Transfer(key(3, 2), 6)
    cache = cache_with(Transfer(key(3), 60), first, last)
    cache.commit()
    assert await cache.find(key(2, 1), 0) is first


async def test_a_version_that_came_to_nothing_is_gone_and_the_one_before_is_not():
    old, new = Transfer(key(1), 60), Transfer(key(2), 60)
    cache = cache_with(old)
    cache.announce(new, [])
    cache.discard()
    assert await cache.find(key(1), 0) is old
    with pytest.raises(UnavailableError):
        await new.read(0, 1)
