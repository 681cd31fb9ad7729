"""The files of a model's folder are judged by names, sizes and headers, before a run starts."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from tests.fixtures.models import write_model, write_shards, write_tensor
from vcpo.local.model_headers import folder_complaints

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 843008\n"


def framed(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_model(tmp_path / "m")


def complaints(folder: Path) -> list[str]:
    return list(folder_complaints(folder))


def test_a_whole_model_needs_no_word(folder):
    assert complaints(folder) == []


def test_a_whole_model_in_shards_needs_no_word(folder):
    write_shards(folder, 3)
    assert complaints(folder) == []


def test_of_a_cut_file_both_sizes_are_told(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5])
    (complaint,) = complaints(folder)
    assert complaint == (
        f"has a model.safetensors that is cut: its header asks for {len(whole)} bytes, and the file"
        f" has {len(whole) - 5}; copy or download it again"
    )


@pytest.mark.parametrize("kept_bytes", [0, 7, 8, 30])
def test_a_file_that_ends_in_its_header_is_cut_as_well(folder, kept_bytes):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    (complaint,) = complaints(folder)
    assert complaint.startswith("has a model.safetensors that is cut: ")
    assert f"the file has {kept_bytes};" in complaint


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        framed(b"[]"),
        framed(b"{{{{"),
        framed(b'{"w": {}}'),
        framed(b'{"w": {"data_offsets": [8, 0]}}'),
    ],
    ids=["random", "no mapping", "no json", "no offsets", "wrong offsets"],
)
def test_what_is_no_safetensors_file_is_called_so(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    (complaint,) = complaints(folder)
    assert complaint.startswith("has a model.safetensors that is no safetensors file (")
    assert complaint.endswith("); copy or download it again")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_told_with_its_command(folder, name):
    (folder / name).write_text(POINTER)
    assert complaints(folder) == [
        f"has a {name} that is a pointer of Git LFS, and not the file; run `git lfs pull` there"
    ]


def test_each_missing_and_each_cut_shard_is_named(folder):
    write_shards(folder, 4)
    for number in (1, 3):
        (folder / f"model-0000{number}-of-00004.safetensors").unlink()
    last = folder / "model-00004-of-00004.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    missing, cut = complaints(folder)
    assert missing == (
        "lacks 2 of 4 files that model.safetensors.index.json names:"
        " model-00001-of-00004.safetensors, model-00003-of-00004.safetensors; copy or download them"
    )
    assert cut.startswith("has a model-00004-of-00004.safetensors that is cut: ")


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": {"w": 3}}', '{"weight_map": {}}']
)
def test_an_index_that_names_no_files_is_refused(folder, index):
    write_shards(folder, 1)
    (folder / "model.safetensors.index.json").write_text(index)
    (complaint,) = complaints(folder)
    assert complaint.startswith("has a model.safetensors.index.json that names no files")


def test_an_index_beside_the_whole_file_is_not_read(folder):
    """As in `transformers`, which looks for the whole file first."""
    (folder / "model.safetensors.index.json").write_text("{}")
    assert complaints(folder) == []


def test_an_index_names_files_of_its_folder_only(folder, tmp_path):
    write_shards(folder, 1)
    write_tensor(tmp_path / "outside.safetensors")
    index = {"weight_map": {"w": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (complaint,) = complaints(folder)
    assert complaint.startswith("has a model.safetensors.index.json that names no files")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.safetensors"])
def test_weights_that_a_learner_does_not_load_are_none(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    (complaint,) = complaints(folder)
    assert complaint == (
        "has no weights (model.safetensors, or shards with model.safetensors.index.json); give a"
        " model's directory"
    )


def test_a_model_without_a_tokenizer_is_told_what_one_is(folder):
    (folder / "tokenizer.json").unlink()
    (complaint,) = complaints(folder)
    assert complaint == (
        "has no tokenizer (tokenizer.json, tokenizer.model or a vocabulary); copy the tokenizer's"
        " files into it, as `save_pretrained` of the tokenizer writes them"
    )


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "qwen.tiktoken", "tekken.json"])
def test_an_older_tokenizer_is_one(folder, name):
    (folder / "tokenizer.json").rename(folder / name)
    assert complaints(folder) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BP'),
        ("tokenizer_config.json", '{"eos_token": '),
        ("tokenizer_config.json", "[]"),
        ("tokenizer.model", ""),
    ],
)
def test_a_tokenizers_file_that_cannot_be_read_is_named(folder, name, content):
    if name == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
    (folder / name).write_text(content)
    (complaint,) = complaints(folder)
    assert complaint.startswith(f"has a {name} that cannot be read (")


@given(start=st.integers(0, 120), garbage=st.binary(min_size=1, max_size=12))
def test_what_the_library_opens_needs_no_word(tmp_path_factory, start, garbage):
    folder = write_model(tmp_path_factory.mktemp("models") / "m")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:start] + garbage + whole[start + len(garbage) :])
    try:
        with safe_open(weights, framework="numpy") as opened:
            opened.keys()
    except SafetensorError:
        return
    assert complaints(folder) == []


@given(share=st.floats(0.0, 1.0, exclude_max=True))
def test_no_part_of_a_file_passes_for_the_whole(tmp_path_factory, share):
    folder = write_model(tmp_path_factory.mktemp("models") / "m")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: int(share * len(whole))])
    assert len(complaints(folder)) == 1
