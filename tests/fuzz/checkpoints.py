"""Targets: the files of a checkpoint, whose bytes and checksums an attacker chose."""

from __future__ import annotations

import atexit
import io
import json
import math
import os
import pickle
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tests.fuzz.target import Target
from vcpo_learner.checkpoints.manifest import DamageError
from vcpo_learner.checkpoints.tensor_files import (
    parameter_shapes,
    read_buffers,
    read_parameters,
)
from vcpo_learner.checkpoints.tensor_index import IndexedTensor, TensorIndex, read_index

_SHAPE = (3, 2)
_PART = "__0_0.distcp"


@cache
def _folder() -> Path:
    """A folder with two files of the rows of a tensor; a check writes an index beside them."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-checkpoint-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in (_PART, "__1_0.distcp"):
        (folder / name).write_bytes(_saved(torch.arange(6.0).view(_SHAPE)))
    return folder


class _Command:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.open, (str(_folder() / "ran"), os.O_CREAT)


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _index_of(tensors: dict[str, Any]) -> bytes:
    return json.dumps({"tensors": tensors}).encode()


def _check_read(folder: Path) -> None:
    """Parameters and buffers are refused, or read in full; and no command has run."""
    try:
        shapes = parameter_shapes(folder)
        tensors = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of complex numbers that become real
            read_parameters(folder, tensors)
            read_buffers(folder)
    except DamageError:
        pass
    finally:
        assert not (folder / "ran").exists()


def _check_index(data: bytes) -> None:
    """An index is refused, or what it makes a reader allocate lies in the files of the folder."""
    folder = _folder()
    (folder / ".metadata").write_bytes(data)
    try:
        index = read_index(folder)
    except DamageError as error:
        assert ".metadata: " in str(error)  # noqa: PT017 - every refusal names the file
    else:
        _check_sound(index, folder)
    _check_read(folder)


def _check_sound(index: TensorIndex, folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    parts = [part for tensor in index.tensors.values() for part in tensor.parts]
    assert {part.file for part in parts} <= sizes.keys()
    assert all(0 <= part.begin < part.end <= sizes[part.file] for part in parts)
    allocated = sum(tensor.num_rows * tensor.row_bytes for tensor in index.tensors.values())
    assert allocated <= sum(part.length for part in parts) <= sum(sizes.values())


def _check_rows(data: bytes) -> None:
    """Any bytes under an index that is sound are refused, or give the rows."""
    folder = _folder() / "rows"
    folder.mkdir(exist_ok=True)
    (folder / _PART).write_bytes(data)
    part = {"file": _PART, "begin": 0, "length": len(data), "first_row": 0, "num_rows": 3}
    index = _index_of({"parameters.a": {"dtype": "float32", "size": _SHAPE, "parts": [part]}})
    (folder / ".metadata").write_bytes(index)
    _check_read(folder)
    assert not (_folder() / "ran").exists()


_LENGTH = len(_saved(torch.arange(6.0).view(_SHAPE)))
_NUMBERS = st.sampled_from((0, 1, 2, 3, 6, 24, -1, 1 << 31, 1 << 53, 1 << 64, 1.5, True, None, "3"))
_FILES = st.sampled_from(
    (_PART, "__1_0.distcp", "__2_0.distcp", ".metadata", "ran", "../x", "/dev/zero", "", "\0", None)
)
_NAMES = st.sampled_from(
    ("parameters.a", "parameters.b", "buffers.a", "moments.a.step", "a", "parameters", "")
)
_DTYPES = st.sampled_from(("float32", "float64", "int64", "bool", "complex64", "object", "", None))


def _replaced(plain: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> Any:
    return st.one_of(plain, plain, plain, other)


_PARTS = st.fixed_dictionaries(
    {
        "file": _replaced(st.sampled_from((_PART, "__1_0.distcp")), _FILES),
        "begin": _replaced(st.just(0), _NUMBERS),
        "length": _replaced(st.just(_LENGTH), _NUMBERS),
        "first_row": _replaced(st.sampled_from((0, 3)), _NUMBERS),
        "num_rows": _replaced(st.just(3), _NUMBERS),
    },
    optional=dict.fromkeys(("transform", "bytes"), _NUMBERS),
)
_ENTRIES = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": _replaced(st.just("float32"), _DTYPES),
            "size": _replaced(
                st.sampled_from(([3, 2], [6, 2], [])), st.lists(_NUMBERS, max_size=10)
            ),
            "parts": st.lists(_PARTS, max_size=3),
        }
    ),
    _PARTS,
    _NUMBERS,
)
assert set(TensorIndex.model_fields) == {"tensors"}
assert set(IndexedTensor.model_fields) == {"dtype", "size", "parts"}
_INDEXES = st.dictionaries(_NAMES, _ENTRIES, max_size=3).map(_index_of)

_DCP_ENTRIES: tuple[Any, ...] = (
    dcp.BytesStorageMetadata(),
    dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype=torch.float32),
        torch.Size(_SHAPE),
        [dcp.ChunkStorageMetadata(torch.Size((0, 0)), torch.Size(_SHAPE))],
    ),
    dcp.StorageMeta(),
    dcp._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST,
    torch.float64,
    Path("/dev/zero"),
    _Command(),
)
"""Whatever DCP's own index is made of: an index that is a pickle must be refused unread."""


def _pickled(entries: Iterable[Any], protocol: int) -> bytes:
    places = {dcp.MetadataIndex("parameters.a"): _StorageInfo(_PART, 0, _LENGTH)}
    named = {f"parameters.{number}": each for number, each in enumerate(entries)}
    return pickle.dumps(dcp.Metadata(named, storage_data=places), protocol=protocol)


_PICKLES = st.builds(
    _pickled, st.lists(st.sampled_from(_DCP_ENTRIES), max_size=4), st.integers(0, 5)
)


def _deflated(data: bytes) -> bytes:
    stream = io.BytesIO()
    plain = zipfile.ZipFile(io.BytesIO(data))
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as small:
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    return stream.getvalue()


_VALUES: tuple[Any, ...] = (
    *(torch.zeros(_SHAPE), torch.zeros(2, 3), torch.zeros(()), torch.zeros(3, 2, dtype=torch.half)),
    *(
        torch.zeros(_SHAPE, dtype=torch.complex64),
        torch.zeros(1).expand(1 << 30, 2),
        "x",
        b"x",
        None,
    ),
    *({"x": _Command()}, [_Command()], torch.nn.Parameter(torch.ones(_SHAPE)), torch.Size(_SHAPE)),
)
_SAVED = st.integers(0, len(_VALUES) - 1).map(lambda index: _saved(_VALUES[index]))

TARGETS = (
    Target(name="tensor_index", inputs=_INDEXES | _PICKLES, check=_check_index),
    Target(
        name="tensor_rows",
        inputs=_SAVED | _SAVED.map(_deflated) | st.binary(max_size=64),
        check=lambda data: _check_rows(data or b"\0"),
        num_short_examples=100,
    ),
)
