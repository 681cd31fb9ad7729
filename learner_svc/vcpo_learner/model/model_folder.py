"""Folders that other programs load, from a checkpoint: a model, or adapters of a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.api.workloads import Model
from vcpo.records.exported_model import ExportedModel, ExportKind
from vcpo.service.model_files import local_model
from vcpo_learner.checkpoints.disk import atomic_folder
from vcpo_learner.checkpoints.tensor_files import (
    parameter_shapes,
    read_buffers,
    read_parameters,
)
from vcpo_learner.model.loading import load_policy

_SHARD_SIZE: Final = "5GB"
"""Largest file of weights, and so the most that writing them holds in memory."""
_IN_MEMORY_BYTES: Final = 1 << 30
"""Larger sets of tensors are mapped files: the kernel writes them back when memory is short."""


class ModelExport:
    """Exports the model of one run. It calls no rank and no GPU, so training may go on."""

    def __init__(
        self,
        run: str,
        settings: Model,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Remember what an export needs beside a checkpoint.

        run: name of the run.
        model: of the run's family and size, with its adapters; its parameters are not read.
        dtype: number format of an exported model; None is that of the initial model's files, and
            float32 for a model without files.
        """
        self._run = run
        self._settings = settings
        self._model = model
        self._tokenizer = tokenizer
        initial = cast("torch.dtype | None", model.config.dtype)
        self._dtype = dtype or initial or torch.float32

    @property
    def num_trained(self) -> int:
        """Number of parameters that are trained."""
        return sum(each.numel() for each in self._model.parameters() if each.requires_grad)

    @property
    def model_bytes(self) -> int:
        """Size of an exported model's weights."""
        return sum(self._dtype.itemsize * each.numel() for each in self._model.parameters())

    @property
    def has_adapters(self) -> bool:
        """Whether the run trains LoRA adapters."""
        return self._settings.lora is not None

    def write_model(self, folder: Path, tensors: Path, *, step: int) -> None:
        """Write model and tokenizer so that `AutoModelForCausalLM.from_pretrained` loads them.

        With LoRA the base model is loaded and the adapters are merged into it.

        tensors: folder of `TensorFiles`.

        Raises:
            DiskFullError: if the disk has no room for it; the call may be repeated.
        """
        shapes = parameter_shapes(tensors)
        with atomic_folder(folder, what="the model", needed_bytes=self.model_bytes) as partial:
            if self.has_adapters:
                merged = _merge_adapters(self._settings, tensors)
                for name, parameter in merged.named_parameters():
                    parameter.data = parameter.data.to(self._dtype_of(name))
                merged.save_pretrained(partial, max_shard_size=_SHARD_SIZE)
            else:
                dtypes = {name: self._dtype_of(name) for name in shapes}
                with _storage(shapes, dtypes, partial / ".scratch") as parameters:
                    read_parameters(tensors, parameters)
                    state = {**read_buffers(tensors), **parameters}
                    self._model.save_pretrained(
                        partial, state_dict=state, max_shard_size=_SHARD_SIZE
                    )
            _name_dtype(partial / "config.json", self._dtype)
            self._tokenizer.save_pretrained(partial)
            self._origin(ExportKind.MODEL, step).write(partial)

    def write_adapters(self, folder: Path, tensors: Path, *, step: int) -> None:
        """Write adapters and tokenizer so that `PeftModel.from_pretrained` loads them.

        tensors: folder of `TensorFiles`.

        Raises:
            DiskFullError: if the disk has no room for it; the call may be repeated.
        """
        from vcpo_learner.model.lora import save_adapters

        adapters = {name: torch.empty(shape) for name, shape in parameter_shapes(tensors).items()}
        read_parameters(tensors, adapters)
        size_bytes = sum(each.numel() * each.element_size() for each in adapters.values())
        with atomic_folder(folder, what="the adapters", needed_bytes=size_bytes) as partial:
            save_adapters(self._model, adapters, self._settings, partial)
            self._tokenizer.save_pretrained(partial)
            self._origin(ExportKind.ADAPTERS, step).write(partial)

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the number format of a parameter; some families keep a few in float32."""
        model = self._model
        kept = set(model._keep_in_fp32_modules_strict or ())
        if self._dtype is torch.float16:
            kept |= set(model._keep_in_fp32_modules or ())
        return torch.float32 if any(each in name for each in kept) else self._dtype

    def _origin(self, kind: ExportKind, step: int) -> ExportedModel:
        return ExportedModel(
            kind=kind,
            run=self._run,
            step=step,
            base_model=self._settings.name,
            parameters=self._model.num_parameters(),
        )


def _merge_adapters(settings: Model, tensors: Path) -> PreTrainedModel:
    """Load the base model of a run, and merge a checkpoint's adapters into it."""
    # peft takes seconds to import, and few runs need it.
    from vcpo_learner.model.lora import merge_adapters

    model, _ = load_policy(
        local_model(settings.name),
        settings.revision,
        settings.lora,
        trust_remote_code=settings.trust_remote_code,
    )
    trained = {name: each.data for name, each in model.named_parameters() if each.requires_grad}
    read_parameters(tensors, trained)
    merge_adapters(model)
    return model


def _name_dtype(path: Path, dtype: torch.dtype) -> None:
    """Name the number format in a model's configuration, and in those of its parts."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for section in (config, *(each for each in config.values() if isinstance(each, dict))):
        if section is config or "dtype" in section:
            section["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _storage(
    shapes: Mapping[str, torch.Size], dtypes: Mapping[str, torch.dtype], scratch: Path
) -> Iterator[dict[str, Tensor]]:
    """Yield tensors of these shapes, in memory or, if they are large, in mapped files."""
    size_bytes = sum(dtypes[name].itemsize * shape.numel() for name, shape in shapes.items())
    if size_bytes <= _IN_MEMORY_BYTES:
        yield {name: torch.empty(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
        return
    scratch.mkdir()
    yield {
        name: torch.from_file(
            str(scratch / str(number)), shared=True, size=shape.numel(), dtype=dtypes[name]
        ).view(shape)
        for number, (name, shape) in enumerate(shapes.items())
    }
    shutil.rmtree(scratch)
