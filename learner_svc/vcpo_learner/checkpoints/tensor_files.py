"""A policy's state and its optimizer's moments as safetensors files, by PyTorch's DCP.

Each rank writes the shards that it holds into files of its own, and a replicated tensor is written
once. The tensors are global there, so another number of ranks reads them again, and so does one
process without ranks. Names are those of the transformers model.

A save stages: it copies the shards to the host's memory and returns. A thread writes the copies
while training goes on.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from vcpo_learner.checkpoints.manifest import DamageError, FileChecksum
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer
from vcpo_learner.policy_state import trainable_parameters, trained_buffers

_PARAMETERS: Final = "parameters."
_BUFFERS: Final = "buffers."
_MOMENTS: Final = "moments."
_FILE_BYTES: Final = 1 << 29
"""About the largest file; a rank holds two such files in memory while it writes one."""


class TensorFiles:
    """The tensors of one learner; with several ranks, each rank's share of them.

    All ranks make the same calls in the same order. Owner: the tensor thread; a thread of its own
    writes the files.
    """

    def __init__(
        self, model: nn.Module, optimizer: PolicyOptimizer, group: dist.ProcessGroup | None = None
    ) -> None:
        """group: of all ranks, for the writing thread alone; None for one rank."""
        self._model = model
        self._optimizer = optimizer
        self._group = group
        # With a GPU the copies stay for the next save, because pinned memory is slow to get. On a
        # CPU they would be half of the learner's memory again.
        self._stager = _new_stager() if torch.cuda.is_available() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[dict[str, FileChecksum]] | None = None

    def save(self, folder: Path) -> Future[dict[str, FileChecksum]]:
        """Copy this rank's tensors, and let a thread write the copies into a folder.

        Waits for the save before. The future has the checksums of all ranks' files by name, on the
        first rank; on the others it is empty. It has an error of whichever rank failed.
        """
        if self._writing is not None:
            wait([self._writing])
        has_gpu = torch.cuda.is_available()
        staged = (self._stager or _new_stager()).stage(self._state(), non_blocking=has_gpu)
        if has_gpu:
            torch.cuda.synchronize()
        self._writing = self._thread.submit(self._write, cast("dict[str, Tensor]", staged), folder)
        return self._writing

    def load(self, folder: Path) -> None:
        """Read the state and the moments into the model and the optimizer."""
        saved = _saved(folder)
        moments = {
            each.removeprefix(_MOMENTS).rpartition(".")[0]
            for each in saved
            if each.startswith(_MOMENTS)
        }
        # A rollback may go back to a step before the first one of some parameters.
        self._optimizer.forget_moments()
        if moments:
            self._optimizer.allocate_moments(moments)
        state = self._state()
        for name in (*state, *saved):
            if name not in state or name not in saved or state[name].shape != saved[name].size:
                raise ValueError(f"tensor {name}: does not fit the model of the run")
        read_tensors(folder, state, self._group)

    def close(self) -> None:
        self._thread.shutdown()

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint holds, not copied.

        The optimizer of a run that has taken no step yet has no moments.
        """
        # By DCP's function, because it makes FSDP gather nothing and leave nothing gathered.
        by_name = get_model_state_dict(self._model)
        state = {
            f"{_PARAMETERS}{name}": by_name[name] for name in trainable_parameters(self._model)
        }
        state |= {f"{_BUFFERS}{name}": each for name, each in trained_buffers(self._model).items()}
        for name, tensors in self._optimizer.moments().items():
            state |= {f"{_MOMENTS}{name}.{kind}": each for kind, each in tensors.items()}
        return cast("dict[str, Tensor]", state)

    def _write(self, staged: Mapping[str, Tensor], folder: Path) -> dict[str, FileChecksum]:
        group = self._group
        numbers = _file_numbers(staged, num_ranks=1 if group is None else group.size())
        writer = HuggingFaceStorageWriter(
            str(folder), fqn_to_index_mapping=numbers, save_distributed=True
        )
        _quietly(
            lambda: save(
                dict(staged), storage_writer=writer, process_group=group, no_dist=group is None
            )
        )
        rank = 0 if group is None else dist.get_rank(group)
        own = {each.name: FileChecksum.of(each) for each in folder.glob(f"shard-{rank + 1:05d}-*")}
        if group is None:
            return own
        gathered: list[Any] | None = None if rank else [None] * group.size()
        dist.gather_object(own, gathered, dst=0, group=group)
        return {name: each for one in gathered or [] for name, each in one.items()}


def parameter_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shapes of the parameters in a folder of `TensorFiles`, by name.

    Raises:
        DamageError: naming the folder, if it cannot be read.
    """
    with _reports_damage(folder):
        return {name: each.size for name, each in _saved_of(folder, _PARAMETERS).items()}


def read_parameters(folder: Path, parameters: Mapping[str, Tensor]) -> None:
    """Read parameters into tensors, without ranks, however many ranks wrote them.

    Raises:
        DamageError: as `parameter_shapes`.
    """
    with _reports_damage(folder):
        read_tensors(folder, {f"{_PARAMETERS}{name}": each for name, each in parameters.items()})


def read_buffers(folder: Path) -> dict[str, Tensor]:
    """Return the buffers in a folder of `TensorFiles`, by name.

    Raises:
        DamageError: as `parameter_shapes`.
    """
    with _reports_damage(folder):
        buffers = {
            name: torch.empty(each.size, dtype=each.properties.dtype)
            for name, each in _saved_of(folder, _BUFFERS).items()
        }
        read_tensors(folder, {f"{_BUFFERS}{name}": each for name, each in buffers.items()})
    return buffers


def read_tensors(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Read tensors by name from a folder of safetensors files; of DTensors, the local shards.

    group: of all ranks, which all call it; None for one rank.
    """
    reader = HuggingFaceStorageReader(str(folder))
    _quietly(
        lambda: load(
            dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None
        )
    )


def _saved(folder: Path) -> dict[str, TensorStorageMetadata]:
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return cast("dict[str, TensorStorageMetadata]", found)


def _saved_of(folder: Path, kind: str) -> dict[str, TensorStorageMetadata]:
    saved = _saved(folder).items()
    return {name.removeprefix(kind): each for name, each in saved if name.startswith(kind)}


def _file_numbers(tensors: Mapping[str, Tensor], *, num_ranks: int) -> dict[str, int]:
    """Return the number of the file of each tensor, from 1; each rank writes all of them."""
    numbers, size_bytes = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = size_bytes // (_FILE_BYTES * num_ranks)
        size_bytes += tensor.numel() * tensor.element_size()
    used = {number: at for at, number in enumerate(sorted(set(numbers.values())), 1)}
    return {name: used[number] for name, number in numbers.items()}


def _new_stager() -> StateDictStager:
    """Return what copies tensors to the host, and keeps the copies as long as it lives.

    `DefaultStager`, which is public, forgets them: in torch 2.11 it stages once and never again.
    """
    return StateDictStager(pin_memory=torch.cuda.is_available())


@contextmanager
def _reports_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise DamageError(f"{folder}: a tensor cannot be read ({cause:.200})") from error


def _quietly(transfer: Callable[[], object]) -> None:
    """Save or load; raise the cause of a failure instead of DCP's collection of tracebacks."""
    # It warns of what is meant: one process without a process group.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", category=UserWarning)
    try:
        transfer()
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        cause.add_note(f"on rank {rank}")
        raise cause from error
