"""Models from a storage: fetched once, complete or not at all."""

import multiprocessing
import shutil
from pathlib import Path

import fsspec
import pytest

from vcpo.service import model_files
from vcpo.service.model_files import ModelFetchError, local_model

TINY = Path("examples/models/tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv(model_files.CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def bucket():
    """A folder in memory with a model, and a file that no model needs."""
    files = fsspec.filesystem("memory")
    files.makedirs("/bucket/tiny", exist_ok=True)
    for path in TINY.iterdir():
        files.pipe_file(f"/bucket/tiny/{path.name}", path.read_bytes())
    files.pipe_file("/bucket/tiny/pytorch_model.bin", b"old")
    yield files
    files.rm("/bucket", recursive=True)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_directories_and_names_on_the_hub_stay_as_they_are(tmp_path):
    assert local_model("Qwen/Qwen2.5-1.5B") == "Qwen/Qwen2.5-1.5B"
    assert local_model(str(tmp_path)) == str(tmp_path)
    assert local_model(f"file://{tmp_path}") == str(tmp_path)


def test_a_model_at_a_url_is_fetched_bit_for_bit(bucket, cache):
    folder = Path(local_model("memory://bucket/tiny"))
    assert folder.parent == cache
    expected = [path for path in TINY.iterdir() if path.suffix in {".json", ".safetensors", ".txt"}]
    assert names(folder) == sorted(path.name for path in expected)
    for path in expected:
        assert (folder / path.name).read_bytes() == path.read_bytes()


def test_it_is_fetched_once(bucket, monkeypatch):
    first = local_model("memory://bucket/tiny")
    monkeypatch.setattr(type(bucket), "get_file", None)  # any transfer would fail
    assert local_model("memory://bucket/tiny") == first


def test_another_content_is_another_folder(bucket):
    first = local_model("memory://bucket/tiny")
    bucket.pipe_file("/bucket/tiny/model.safetensors", b"newer")
    second = local_model("memory://bucket/tiny")
    assert second != first
    assert (Path(second) / "model.safetensors").read_bytes() == b"newer"


def test_a_worker_fetches_no_weights(bucket):
    folder = local_model("memory://bucket/tiny", with_weights=False)
    assert "config.json" in names(folder)
    assert "model.safetensors" not in names(folder)


def test_an_attempt_that_broke_off_is_never_taken_for_a_model(bucket, cache, monkeypatch):
    def break_off(_, path, target, **options):
        Path(target).write_bytes(b"half")
        raise ConnectionError("reset by peer")

    with monkeypatch.context() as broken:
        broken.setattr(type(bucket), "get_file", break_off)
        with pytest.raises(ModelFetchError, match=r"cannot be fetched.*ConnectionError: reset"):
            local_model("memory://bucket/tiny")
    assert not any((path / "config.json").exists() for path in cache.glob("*-????????????????"))
    folder = Path(local_model("memory://bucket/tiny"))
    assert (folder / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
    assert [name for name in names(cache) if name.endswith(".partial")] == []


def test_processes_of_a_host_wait_for_the_one_that_fetches(bucket, cache, tmp_path):
    source = tmp_path / "storage"
    shutil.copytree(TINY, source)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()

    def fetch():
        found.put(local_model(f"local://{source}"))

    children = [context.Process(target=fetch) for _ in range(3)]
    for child in children:
        child.start()
    folders = {found.get() for _ in children}
    for child in children:
        child.join(20)
        assert child.exitcode == 0
    (folder,) = folders
    assert names(cache) == sorted([Path(folder).name, f"{Path(folder).name}.lock"])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://nowhere", "'memory://nowhere' cannot be fetched (FileNotFoundError: "),
        ("memory://bucket", "has no config.json"),
        ("s3://bucket/model", "needs the package s3fs; pip install s3fs"),
        ("gs://bucket/model", "needs the package gcsfs; pip install gcsfs"),
        ("s3://", "names no folder; give one, such as s3://bucket/folder"),
        ("file://models/tiny", "is not an absolute path; give file:///folder"),
        ("ftq://bucket", "is of a kind that fsspec does not know ('ftq'"),
    ],
)
def test_what_cannot_be_fetched_is_said_with_the_cure(bucket, url, words):
    with pytest.raises(ModelFetchError) as caught:
        local_model(url)
    assert words in str(caught.value)
    assert str(caught.value).startswith("spec.model.name: ")


def test_a_file_that_came_in_part_is_no_model(bucket, monkeypatch):
    monkeypatch.setattr(
        type(bucket), "get_file", lambda _, path, target, **__: Path(target).write_bytes(b"half")
    )
    with pytest.raises(ModelFetchError, match=r"has 4 of \d+ bytes"):
        local_model("memory://bucket/tiny")


def test_weights_are_missed_only_where_they_are_needed(bucket):
    bucket.rm("/bucket/tiny/model.safetensors")
    with pytest.raises(ModelFetchError, match=r"has no weights \(\*\.safetensors\)"):
        local_model("memory://bucket/tiny")
    local_model("memory://bucket/tiny", with_weights=False)
