import asyncio
import shutil
import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.fixtures.learner.dispatcher import INCARNATION, ManualClock, settle
from tests.fixtures.weight_changes import prepare, store_in_process
from vcpo.api.workloads import Weights
from vcpo.wire.deltas import apply_deltas, chain_to, elements_of
from vcpo.wire.errors import NotFoundError
from vcpo.wire.weights import delta_name, full_set_name, verify
from vcpo_learner.weights.store import PolicyStore, VersionFolder


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store(clock):
    return store_in_process(INCARNATION, clock)


def publish(store, version):
    payload = safetensors.torch.save({"weight": torch.full((2,), float(version))})
    store.publish(prepare(store, version, payload))


def newest(store, *, held=None, incarnation="", wait_s=0.0):
    return store.wait_for_newest(held_incarnation=incarnation, held_version=held, wait_s=wait_s)


async def test_whoever_holds_nothing_gets_the_newest_at_once(store):
    publish(store, 0)
    publish(store, 1)
    assert (await newest(store, wait_s=30)).policy_version == 1


async def test_a_holder_of_the_newest_waits_for_the_next(store):
    publish(store, 0)
    waiting = asyncio.create_task(newest(store, held=0, incarnation=INCARNATION, wait_s=30))
    await settle()
    assert not waiting.done()
    publish(store, 1)
    assert (await waiting).policy_version == 1


async def test_a_holder_of_the_newest_version_receives_it_again_when_its_wait_ends(store):
    publish(store, 4)
    policy = await newest(store, held=4, incarnation=INCARNATION)
    assert policy.policy_version == 4


async def test_a_version_of_another_incarnation_is_not_the_same_version(store):
    publish(store, 4)
    policy = await newest(store, held=4, incarnation="before", wait_s=30)
    assert policy.incarnation == INCARNATION


async def test_before_the_first_version_there_is_nothing_to_find(store):
    with pytest.raises(NotFoundError, match="no version has been published"):
        await newest(store)


def publish_sparse(store, *versions, size=1000):
    """Versions that differ in one element each."""
    for version in versions:
        weight = torch.zeros(size)
        weight[version] = 1.0
        payload = safetensors.torch.save({"weight": weight})
        store.publish(prepare(store, version, payload))


def chain(store):
    deltas = store.newest.deltas
    return [(delta.base_policy_version, delta.policy_version) for delta in deltas]


def files(store):
    """What is in the folder."""
    found = store._folder._files.ls(store._folder._path, detail=False)
    return sorted(path.rpartition("/")[2] for path in found)


def read_whole(store):
    """The newest version, as a worker reads it that holds nothing."""
    is_whole, deltas = chain_to(store.newest, None)
    assert is_whole
    read = store._folder._files.cat_file
    folder = store._folder._path
    payload = bytearray(read(f"{folder}/{full_set_name(store.newest.full_set_version)}"))
    apply_deltas(elements_of(payload), [read(f"{folder}/{delta_name(each)}") for each in deltas])
    return payload


def test_every_version_of_many_can_be_read_whole_with_a_quarter_more_than_its_room(store):
    full_sets = set()
    for version in range(60):
        publish_sparse(store, version)
        manifest = store.newest
        full_sets.add(manifest.full_set_version)
        _, deltas = chain_to(manifest, None)
        assert sum(each.total_bytes for each in deltas) <= 0.25 * manifest.total_bytes
        verify(read_whole(store), manifest)
    assert len(full_sets) == 60 // (1 + len(chain(store))) + 1


def test_what_a_version_replaces_stays_until_the_next_one_is_written(store):
    publish(store, 0)
    publish(store, 1)
    publish(store, 2)
    assert files(store) == ["00000000.full", "00000001.full", "00000002.full"]
    publish(store, 3)
    assert files(store) == ["00000001.full", "00000002.full", "00000003.full"]


def test_a_folder_in_memory_holds_one_full_set(tmp_path, clock):
    folder = VersionFolder(str(tmp_path), INCARNATION, 0, is_temporary=True)
    store = PolicyStore(folder, incarnation=INCARNATION, clock=clock)
    for version in range(4):
        publish(store, version)
    assert files(store) == ["00000003.full"]


@pytest.fixture
def mapped(tmp_path, clock):
    """A store whose full set is the file that others read."""
    folder = VersionFolder(str(tmp_path), INCARNATION, 0, is_temporary=True)
    store = PolicyStore(folder, incarnation=INCARNATION, clock=clock)
    payload = safetensors.torch.save({"weight": torch.zeros(1000)})
    store.publish(prepare(store, 0, payload, in_memory=True))
    return store


def test_a_full_set_in_memory_is_one_file_by_the_name_of_each_version_that_deltas_lead_from(mapped):
    for version in range(1, 60):
        publish_sparse(mapped, version)
        assert chain_to(mapped.newest, None) == (True, ())
        verify(read_whole(mapped), mapped.newest)
    mapped._remove_replaced()
    names = {full_set_name(base) for base, _ in chain(mapped)} | {full_set_name(59)}
    found = {each.name: each for each in Path(mapped._folder.url).glob("*.full")}
    assert found.keys() == names
    assert len({each.stat().st_ino for each in found.values()}) == 1


def test_a_file_that_the_next_one_replaces_is_gone_first_and_read_to_its_end(mapped):
    before = bytes(mapped.content)
    with (Path(mapped._folder.url) / full_set_name(0)).open("rb") as reading:
        memory = mapped.full_set_memory(len(before))
        assert files(mapped) == ["mapped"]
        memory[:] = bytes(len(before))
        assert reading.read() == before


def test_a_delta_of_more_than_a_quarter_of_a_full_set_is_kept_until_the_next(store):
    weight = torch.zeros(1000)
    for version in range(4):
        weight[:400] += 1.0
        store.publish(prepare(store, version, safetensors.torch.save({"weight": weight})))
        verify(read_whole(store), store.newest)
    assert chain(store) == [(2, 3)]


def test_a_version_that_changes_too_much_has_no_delta_and_starts_a_new_chain(store):
    publish_sparse(store, 0, 1)
    publish(store, 2)
    assert (chain(store), store.newest.full_set_version) == ([], 2)


def opened(run_dir, incarnation, **settings):
    return VersionFolder.open(Weights(**settings), "run", run_dir, incarnation=incarnation, shard=0)


def test_by_default_files_are_in_memory_for_this_user_alone_and_old_ones_are_removed(tmp_path):
    before = opened(tmp_path, "killed")
    before.write("00000000.full", b"left")
    folder = opened(tmp_path, "next")
    try:
        assert not Path(before.url).exists()
        root = folder.served_root
        assert root.parent == Path("/dev/shm")
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert opened(tmp_path / "other", "next").served_root != root
        folder.write("00000000.full", b"of a server that was killed")
        folder.empty()
        assert not Path(folder.url).exists()
    finally:
        shutil.rmtree(root)
        shutil.rmtree(opened(tmp_path / "other", "next").served_root)


def test_a_store_on_a_volume_is_named_by_the_run_and_left_to_its_owner(tmp_path):
    before = opened(tmp_path, "before", storeUrl=str(tmp_path / "store"))
    before.write("00000000.full", b"kept")
    folder = opened(tmp_path, "next", storeUrl=str(tmp_path / "store"))
    assert folder.url == f"{tmp_path}/store/run/next/0"
    assert (Path(before.url) / "00000000.full").read_bytes() == b"kept"
    assert stat.S_IMODE((Path(before.url) / "00000000.full").stat().st_mode) & 0o044
    before.empty()
    assert not list(Path(before.url).iterdir())


def test_a_store_that_cannot_be_used_is_named_with_its_field(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"spec\.weights\.storeUrl: cannot write to '.*file/run"):
        opened(tmp_path, "i", storeUrl=str(tmp_path / "file" / "run"))
    with pytest.raises(ValueError, match=r"spec\.weights\.storeUrl: .*unknownproto"):
        opened(tmp_path, "i", storeUrl="unknownproto://bucket/folder")


def test_a_full_store_is_named_with_its_field_and_the_bytes(tmp_path, clock):
    folder = VersionFolder(str(tmp_path), INCARNATION, 0, is_temporary=True)
    store = PolicyStore(folder, incarnation=INCARNATION, clock=clock)
    Path(folder.url).rmdir()
    Path(folder.url).symlink_to("/dev/full")
    for write in (lambda: store.full_set_memory(9), lambda: publish(store, 0)):
        with pytest.raises(OSError, match=r"spec\.weights\.storeUrl: cannot write [0-9]+ bytes to"):
            write()
