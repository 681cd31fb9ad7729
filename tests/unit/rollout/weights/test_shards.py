"""A version in shards arrives from several servers, exactly or not at all."""

import contextlib
from threading import Thread

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.rollout.policy_versions import cut_at, flip_bit
from tests.fixtures.rollout.shards import (
    TWO_RANKS,
    ShardedWorker,
    first_tensors,
    sharded_learner,
    with_changes,
)
from vcpo.wire.weights import CorruptWeightsError, shards_of
from vcpo_rollout.weights.receiver import _FullSet

FIRST = first_tensors()


def sent(learner):
    """Bytes that each rank has sent since the last call."""
    counts = [server.num_bytes for server in learner.servers]
    for server in learner.servers:
        server.num_bytes = 0
    return counts


async def test_a_shard_that_arrives_while_room_is_made_for_another_is_not_lost(monkeypatch):
    allocate = _FullSet._allocate
    later: list[Thread] = []

    def slow(self):
        if not later:
            later.append(Thread(target=arrive, args=[self, 1]))
            later[0].start()
            later[0].join(0.2)  # as long as it may take if nothing holds it up
        allocate(self)

    def arrive(full_set, shard):
        full_set.take(shard, bytearray(learner.shard_file(shard, FIRST)))

    monkeypatch.setattr(_FullSet, "_allocate", slow)
    with sharded_learner(TWO_RANKS) as learner:
        learner.publish(0, FIRST)
        full_set = _FullSet(shards_of(learner.manifest()))
        arrive(full_set, 0)
        later[0].join()
    assert all(rows.any() for shard in full_set.rows for rows in shard.values())


async def test_a_server_that_dies_in_the_middle_leaves_the_bytes_of_all_shards():
    with sharded_learner(TWO_RANKS) as learner:
        worker = ShardedWorker(learner)
        learner.publish(0, FIRST)
        learner.servers[1].failures = [cut_at(1000), cut_at(0)]
        assert await worker.take() is None
        assert await worker.take() is None
        learner.stop(1)
        assert await worker.take() is None
        learner.start(1)
        assert (await worker.take()).policy_version == 0
        assert [offset for _, offset in learner.servers[1].requests] == [0, 1000, 1000]
        assert sent(learner) == [len(learner.shard_file(n, FIRST)) for n in (0, 1)]


@st.composite
def cuts_of_model(draw):
    """Where one to four ranks' rows begin and end, for each tensor at other rows."""
    num_ranks = draw(st.integers(1, 4))
    cuts = {}
    for name, tensor in FIRST.items():
        rows = tensor.shape[0] if tensor.ndim else 1
        inner = sorted(
            draw(st.lists(st.integers(0, rows), min_size=num_ranks - 1, max_size=num_ranks - 1))
        )
        cuts[name] = (0, *inner, rows)
    return cuts


class History:
    """A learner's versions, some of whose files are written before they are announced."""

    def __init__(self, learner):
        self._learner = learner
        self._tensors, self.version = FIRST, -1
        self._early = {}
        """Prepared by rank, of the version that is announced next."""
        self.publish()

    def publish(self, share=0.002):
        self._renew(share)
        self.version += 1
        numbers = range(self._learner.num_shards)
        ready = [
            self._early.get(number) or self._prepare(number, self.version) for number in numbers
        ]
        self._early = {}
        self._learner.announce(self.version, self._tensors, ready)

    def write_early(self, number):
        self._renew(0.002)
        if number not in self._early:
            self._early[number] = self._prepare(number, self.version + 1)

    def _renew(self, share):
        if not self._early:
            self._tensors = with_changes(self._tensors, self.version, share=share)

    def _prepare(self, number, version):
        return self._learner.prepare(number, version, self._tensors)


def written_while_sent(history, number, size):
    def write(data):
        history.write_early(number)
        return data[: size % len(data)]

    return write


async def take(worker):
    """Take what there is; the worker compares every version that it gets with the learner's."""
    with contextlib.suppress(CorruptWeightsError):
        await worker.take()


async def step(action, rank, size, *, history, learner, worker):
    """What happens next; a failure is met by the next transfer from the rank."""
    failures = learner.servers[rank].failures
    match action:
        case "publish":
            history.publish()
        case "publish all":
            history.publish(share=1.0)
        case "flip":
            failures.append(flip_bit(size, size % 8))
        case "break":
            failures.append(lambda data: data[: size % len(data)])
        case "write":
            failures.append(written_while_sent(history, rank, size))
        case "stop":
            learner.stop(rank)
        case "start":
            learner.start(rank)
        case "take":
            await take(worker)


ACTIONS = ("publish", "publish all", "take", "take", "flip", "break", "write", "stop", "start")


@settings(deadline=None, max_examples=25)
@given(
    cuts=cuts_of_model(),
    steps=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.integers(0, 10_000)), max_size=14
    ),
)
async def test_any_cut_and_any_history_give_the_engine_the_exact_whole(cuts, steps):
    with sharded_learner(cuts) as learner:
        worker = ShardedWorker(learner)
        history = History(learner)
        for action, number, size in steps:
            rank = number % learner.num_shards
            await step(action, rank, size, history=history, learner=learner, worker=worker)
        for rank in range(learner.num_shards):
            learner.servers[rank].failures.clear()
            learner.start(rank)
        history.publish()
        for _ in range(2):  # what broke off may be spoiled, and is then read again
            await take(worker)
        assert worker.in_use == history.version
