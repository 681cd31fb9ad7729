"""A policy's state and its optimizer's moments in files, by PyTorch's distributed checkpoint (DCP).

Each rank writes the shards that it holds into a file of its own, and a replicated tensor is written
once. The tensors are global there, so another number of ranks reads them again, and so does one
process without ranks. Names are those of the transformers model.

A save stages: it copies the shards to the host's memory and returns. A thread writes the copies
while training goes on. The checksum of a file is computed from the bytes on their way to the disk.
"""

from __future__ import annotations

import io
import pickle
import struct
import warnings
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from os import PathLike
from pathlib import Path
from typing import IO, Any, Final, cast
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, WriteResult

from vcpo_learner.checkpoints.manifest import DamageError, FileChecksum
from vcpo_learner.checkpoints.tensor_index import (
    BUFFERS,
    INDEX_FILE,
    MOMENTS,
    PARAMETERS,
    TensorIndex,
    read_index,
)
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer
from vcpo_learner.policy_state import trainable_parameters, trained_buffers

_Named = dict[str, Any]
_MOST_DIRECTORY_BYTES: Final = 4096
"""Several times what `torch.save` writes at the end of a part, to say what is in it."""
_UNREADABLE: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    BadZipFile,
    pickle.UnpicklingError,
    struct.error,
)
"""Errors of torch for bytes that are no tensor, or another one than the index says."""


class TensorFiles:
    """The tensors of one learner; with several ranks, each rank's share of them.

    All ranks make the same calls in the same order. Owner: the tensor thread; a thread of its own
    writes the files.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: PolicyOptimizer,
        group: dist.ProcessGroup | None = None,
        *,
        keeps_copies: bool | None = None,
    ) -> None:
        """Remember model and optimizer.

        group: of all ranks, for nothing else, because the writing thread uses it beside training;
            None for one rank.
        keeps_copies: whether a save's copies stay for the next one; None is with a GPU, as pinned
            memory is slow to get. On a CPU they would be half of the learner's memory again.
        """
        self._model = model
        self._optimizer = optimizer
        self._group = group
        keeps = torch.cuda.is_available() if keeps_copies is None else keeps_copies
        self._stager = _new_stager() if keeps else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[dict[str, FileChecksum]] | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the tensors that `save` writes now, on all ranks together."""
        return _size_bytes(self._state())

    def save(self, folder: Path) -> Future[dict[str, FileChecksum]]:
        """Copy this rank's tensors, and let a thread write the copies into a folder.

        Waits for the save before. The future has the checksums of all ranks' files by name, on the
        first rank; on the others it is empty. It has an error of whichever rank failed.
        """
        if self._writing is not None:
            wait([self._writing])
        staged = _stage(self._stager or _new_stager(), self._state())
        self._writing = self._thread.submit(self._write, staged, folder)
        return self._writing

    def load(self, folder: Path) -> None:
        """Read the state and the moments into the model and the optimizer.

        Raises:
            ValueError: if a name or shape does not fit the model.
            DamageError: as `read_index`.
        """
        reader = TensorReader(folder)
        saved = reader.index.state_dict_metadata
        keys = [key.removeprefix(f"{MOMENTS}.") for key in saved if key.startswith(f"{MOMENTS}.")]
        # A rollback may go back to a step before the first one of some parameters.
        self._optimizer.forget_moments()
        if keys:
            self._optimizer.allocate_moments({key.rpartition(".")[0] for key in keys})
        state = self._state()
        _check_fit(state, saved)
        read_tensors(reader, state, self._group)

    def close(self) -> None:
        """Wait for the save in flight."""
        self._thread.shutdown()

    def _state(self) -> _Named:
        """Return the tensors that a checkpoint holds, not copied.

        The optimizer of a run that has taken no step yet has no moments.
        """
        # By DCP's function, because it makes FSDP gather nothing and leave nothing gathered.
        by_name = get_model_state_dict(self._model)
        buffers, moments = trained_buffers(self._model), self._optimizer.moments()
        return {
            PARAMETERS: {name: by_name[name] for name in trainable_parameters(self._model)},
            **({BUFFERS: buffers} if buffers else {}),
            **({MOMENTS: moments} if moments else {}),
        }

    def _write(self, staged: _Named, folder: Path) -> dict[str, FileChecksum]:
        writer = _ChecksummingWriter(folder)
        _quietly(
            lambda: save(
                staged,
                storage_writer=writer,
                process_group=self._group,
                no_dist=self._group is None,
            )
        )
        if self._group is None:
            return writer.checksums
        is_first = dist.get_rank(self._group) == 0
        gathered: list[Any] | None = [None] * self._group.size() if is_first else None
        dist.gather_object(writer.checksums, gathered, dst=0, group=self._group)
        return {name: each for one in gathered or [] for name, each in one.items()}


def _new_stager() -> StateDictStager:
    """Return what copies tensors to the host, and keeps the copies as long as it lives.

    `DefaultStager`, which is public, forgets them: in torch 2.11 it stages once and never again.
    """
    return StateDictStager(pin_memory=torch.cuda.is_available())


def _stage(stager: StateDictStager, state: _Named) -> _Named:
    """Return a copy of tensors in the host's memory, when it is complete."""
    has_gpu = torch.cuda.is_available()
    staged = cast("_Named", stager.stage(state, non_blocking=has_gpu))
    if has_gpu:
        torch.cuda.synchronize()
    return staged


def parameter_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shapes of the parameters in a folder of `TensorFiles`, by name.

    Raises:
        DamageError: as `read_index`.
    """
    return {name: each.size for name, each in _entries(folder, PARAMETERS).items()}


def read_parameters(folder: Path, parameters: Mapping[str, Tensor]) -> None:
    """Read parameters into tensors, without ranks, however many ranks wrote them.

    Raises:
        DamageError: naming the folder, if its index or one of its tensors cannot be read.
    """
    _read(folder, PARAMETERS, parameters)


def read_buffers(folder: Path) -> dict[str, Tensor]:
    """Return the buffers in a folder of `TensorFiles`, by name.

    Raises:
        DamageError: as `read_parameters`.
    """
    buffers = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in _entries(folder, BUFFERS).items()
    }
    if buffers:
        _read(folder, BUFFERS, buffers)
    return buffers


def _entries(folder: Path, kind: str) -> dict[str, TensorStorageMetadata]:
    """Return what an index says of the tensors of a kind, by name."""
    return {
        name.removeprefix(f"{kind}."): cast("TensorStorageMetadata", each)
        for name, each in read_index(folder).metadata().state_dict_metadata.items()
        if name.startswith(f"{kind}.")
    }


def _read(folder: Path, kind: str, tensors: Mapping[str, Tensor]) -> None:
    reader = TensorReader(folder)
    try:
        read_tensors(reader, {kind: dict(tensors)})
    except _UNREADABLE as error:
        cause = f"{type(error).__name__}: {error}"
        raise DamageError(f"{folder}: a tensor cannot be read ({cause:.200})") from error


def read_tensors(
    reader: StorageReader, tensors: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Read into tensors, and into the local shards of DTensors.

    group: of all ranks, which all call it; None for one rank.
    """
    state = dict(tensors)
    _quietly(
        lambda: load(
            state,
            storage_reader=reader,
            planner=_TensorPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    )


class TensorReader(FileSystemReader):
    """Reads the tensors of a checkpoint by its `TensorIndex`."""

    def __init__(self, folder: Path) -> None:
        """Read the index of a folder.

        Raises:
            DamageError: as `read_index`.
        """
        super().__init__(folder)
        self.index = read_index(folder).metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index as DCP reads it."""
        del args, kwargs
        return self.index

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        """Return the bytes of a part, which `torch.load` reads with `weights_only`.

        Raises:
            ValueError: if something in them is compressed, so that it may grow without bound.
        """
        with ZipFile(_EndOfPart(file, sinfo)) as archive:
            if any(each.compress_type != ZIP_STORED for each in archive.infolist()):
                raise ValueError(f"{sinfo.relative_path}: byte {sinfo.offset}: is compressed")
        return super()._slice_file(file, sinfo)


class _EndOfPart(io.RawIOBase):
    """A part of a file of which only the end can be read, where a zip archive has its directory.

    Its places are those of the whole part. Python from 3.11.14, 3.12.12 and 3.13.8 on refuses an
    archive whose directory does not lie where the archive says (CVE-2025-8291).
    """

    def __init__(self, file: Any, part: _StorageInfo) -> None:
        super().__init__()
        self._file = file
        self._part = part
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._part.length}
        self._at = starts[whence] + offset
        if self._at < 0:
            raise OSError(f"{self._at} lies before the part")
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Read from the current place on.

        Raises: ValueError before the end of the part, so that no directory takes all memory.
        """
        if self._at < self._part.length - _MOST_DIRECTORY_BYTES:
            raise ValueError(f"{self._part.relative_path}: its directory is too large")
        self._file.seek(self._part.offset + self._at)
        wanted = memoryview(buffer)[: max(0, self._part.length - self._at)]
        count: int = self._file.readinto(wanted)
        self._at += count
        return count


class _TensorPlanner(DefaultLoadPlanner):
    """Plans reads of tensors, and of nothing that `torch.load` would read without limits."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise: DCP would unpickle the bytes, and so run what they name."""
        del value
        raise DamageError(f"{read_item.dest_index.fqn}: is no tensor, so it is not read")


class _ChecksummingWriter(FileSystemWriter):
    """Writes one file for each rank and computes its checksum on the way."""

    def __init__(self, folder: Path) -> None:
        # Nothing is on a GPU any more, so nothing is to be copied ahead.
        super().__init__(folder, per_thread_copy_ahead=0)
        self._files = self.fs = _ChecksummingFileSystem()

    @property
    def checksums(self) -> dict[str, FileChecksum]:
        """Checksums of the files that this rank has written, by name."""
        return {path.name: file.checksum() for path, file in self._files.written.items()}

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch says that it could not write, and the file knows why.
            causes = (file.error for file in self._files.written.values())
            raise next(filter(None, causes), error) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of what all ranks have written; on the first rank."""
        written = {each.index: each.storage_data for one in results for each in one}
        index = TensorIndex.of(metadata, written)
        with self._files.create_stream(Path(self.path) / INDEX_FILE, "wb") as file:
            file.write(index.model_dump_json().encode())


class _ChecksummingFileSystem(FileSystem):
    """Opens files that compute their checksum."""

    def __init__(self) -> None:
        self.written: dict[Path, ChecksummingFile] = {}

    @contextmanager
    def create_stream(
        self, path: str | PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with closing(ChecksummingFile(io.FileIO(path, mode))) as file:
            self.written[Path(path)] = file
            yield file


class ChecksummingFile(io.BufferedWriter):
    """A file that computes its checksum and remembers its last error, because torch discards it."""

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw)
        self._digest = xxhash.xxh3_64()
        self._size_bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of the data, and take it into the checksum."""
        try:
            written = super().write(data)
            self.flush()
        except OSError as error:
            self.error = error
            raise
        self._digest.update(data)
        self._size_bytes += written
        return written

    def checksum(self) -> FileChecksum:
        """Return the checksum of what was written."""
        return FileChecksum(size_bytes=self._size_bytes, xxh3=self._digest.hexdigest())


def _check_fit(state: _Named, saved: Mapping[str, object]) -> None:
    """Compare tensors with those of a checkpoint.

    Raises:
        ValueError: naming the first tensor that does not fit.
    """
    own = dict(_flat(state))
    for name in (*own, *saved):
        there, here = saved.get(name), own.get(name)
        shape = there.size if isinstance(there, TensorStorageMetadata) else None
        if here is None or here.shape != shape:
            raise ValueError(f"tensor {name}: does not fit the model of the run")


def _flat(state: _Named, prefix: str = "") -> Generator[tuple[str, Tensor], None, None]:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _size_bytes(state: _Named) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in _flat(state))


def _quietly(transfer: Any) -> None:
    """Save or load; raise the cause of a failure instead of DCP's collection of tracebacks."""
    # It warns of what is meant: one process without a process group.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", category=UserWarning)
    try:
        transfer()
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        cause.add_note(f"on rank {rank}")
        raise cause from error
