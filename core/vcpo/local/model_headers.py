"""Checks of a model folder's files by their names, sizes and headers; no tensor is read.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: where
each tensor begins and ends in what follows), and the tensors without a gap.
Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_TOKENIZER: Final = "tokenizer.json"
_VOCABULARIES: Final = (
    _TOKENIZER,
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
)
"""Files of which a tokenizer has one at least."""
_TOKENIZER_SETTINGS: Final = "tokenizer_config.json"
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000
"""Longest header that the library reads."""
_POINTER: Final = b"version https://git-lfs"
_PULL: Final = "run `git lfs pull` there"
_NAMED: Final = 4
"""Missing files that a message names; it counts the others."""
_AGAIN: Final = "copy or download it again"


class _UnusableError(Exception):
    """A file cannot be what its name says; the message ends the sentence about it."""


def folder_complaints(folder: Path, *, may_lack: bool = False) -> Iterator[str]:
    """Yield what is wrong with the files of a model's folder, each as the end of a sentence.

    may_lack: whether files that are missing will be downloaded.
    """
    if (folder / _WEIGHTS).is_file():
        yield from _complaints_of(folder / _WEIGHTS, _check_header)
    elif (folder / _INDEX).is_file():
        yield from _shard_complaints(folder, may_lack=may_lack)
    elif not may_lack:
        yield f"has no weights ({_WEIGHTS}, or shards with {_INDEX}); give a model's directory"
    yield from _tokenizer_complaints(folder, may_lack=may_lack)


def _shard_complaints(folder: Path, *, may_lack: bool) -> Iterator[str]:
    try:
        names = _shards(folder / _INDEX)
    except _UnusableError as error:
        yield f"has a {_INDEX} that names no files of its folder ({error}); {_AGAIN}"
        return
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and not may_lack:
        others = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        yield (
            f"lacks {len(missing)} of {len(names)} files that {_INDEX} names:"
            f" {', '.join(missing[:_NAMED])}{others}; copy or download them"
        )
    for name in names:
        if name not in missing:
            yield from _complaints_of(folder / name, _check_header)


def _tokenizer_complaints(folder: Path, *, may_lack: bool) -> Iterator[str]:
    """Yield what is wrong with the tokenizer; of several vocabularies the first one is read."""
    vocabularies = (path for pattern in _VOCABULARIES for path in sorted(folder.glob(pattern)))
    vocabulary = next(vocabularies, None)
    if vocabulary is not None:
        yield from _complaints_of(vocabulary, _check_vocabulary)
    elif not may_lack:
        yield (
            f"has no tokenizer ({_TOKENIZER}, tokenizer.model or a vocabulary); copy the"
            " tokenizer's files into it, as `save_pretrained` of the tokenizer writes them"
        )
    if (folder / _TOKENIZER_SETTINGS).is_file():
        yield from _complaints_of(folder / _TOKENIZER_SETTINGS, _read_mapping)


def _complaints_of(path: Path, check: Callable[[Path], object]) -> Iterator[str]:
    """Yield what a check finds in a file."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
        if is_pointer:
            yield f"has a {path.name} that is a pointer of Git LFS, and not the file; {_PULL}"
        else:
            check(path)
    except _UnusableError as error:
        yield f"has a {path.name} that {error}"
    except OSError as error:
        yield f"has a {path.name} that cannot be read ({error.strerror})"


def _check_header(path: Path) -> None:
    """Compare what the header of a safetensors file names with the file's size.

    Raises:
        _UnusableError: if the file is cut, or of another kind.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        begin = _LENGTH_BYTES + header_bytes
        if size_bytes < _LENGTH_BYTES:
            _refuse_size(_LENGTH_BYTES, size_bytes)
        if header_bytes > _MAX_HEADER_BYTES:
            raise _UnusableError(_foreign(f"its header would have {header_bytes} bytes"))
        if size_bytes < begin:
            _refuse_size(begin, size_bytes)
        text = file.read(header_bytes)
    try:
        needed_bytes = begin + _data_bytes(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _UnusableError(_foreign(f"its header: {type(error).__name__}: {error}")) from error
    if size_bytes != needed_bytes:
        _refuse_size(needed_bytes, size_bytes)


def _data_bytes(header: dict[str, dict[str, Any]]) -> int:
    """Return the end of the last tensor."""
    data_bytes = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        start, end = tensor["data_offsets"]
        if not 0 <= start <= end:
            raise ValueError(f"{name} from {start} to {end}")
        data_bytes = max(data_bytes, end)
    return data_bytes


def _refuse_size(needed_bytes: int, size_bytes: int) -> NoReturn:
    what = "is cut" if size_bytes < needed_bytes else "is too long"
    raise _UnusableError(
        f"{what}: its header asks for {needed_bytes} bytes, and the file has {size_bytes}; {_AGAIN}"
    )


def _foreign(why: str) -> str:
    return f"is no safetensors file ({why}); {_AGAIN}"


def _shards(index: Path) -> list[str]:
    """Return the names of the files of an index, each once.

    Raises:
        _UnusableError: if it names none, or one outside of its folder.
    """
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _UnusableError(f"{type(error).__name__}: {error}") from error
    if strange := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise _UnusableError(f"it names {strange[0]!r}")
    if not names:
        raise _UnusableError("its weight_map is empty")
    return names


def _check_vocabulary(path: Path) -> None:
    """Read a tokenizer's file as the library does, if that is installed.

    Raises:
        _UnusableError: if it cannot be read.
    """
    if path.stat().st_size == 0:
        raise _UnusableError(_unreadable("it is empty"))
    if path.suffix == ".json":
        _read_mapping(path)
    if path.name == _TOKENIZER and importlib.util.find_spec("tokenizers") is not None:
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no class of its own for what it refuses
            raise _UnusableError(_unreadable(str(error))) from error


def _read_mapping(path: Path) -> None:
    """Check that a file is a mapping in JSON.

    Raises:
        _UnusableError: if it is not.
    """
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _UnusableError(_unreadable(str(error))) from error
    if not isinstance(document, dict):
        raise _UnusableError(_unreadable(f"it is a {type(document).__name__}, not a mapping"))


def _unreadable(why: str) -> str:
    return f"cannot be read ({why}); {_AGAIN}"
