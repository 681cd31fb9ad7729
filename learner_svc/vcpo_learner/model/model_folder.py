"""Folders that other programs load, from a checkpoint: a model, or adapters of a model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.api.workloads import Model
from vcpo.records.exported_model import ExportedModel, ExportKind
from vcpo.service.model_files import local_model
from vcpo_learner.checkpoints.manifest import DamageError, atomic_folder
from vcpo_learner.checkpoints.tensor_files import parameter_shapes, read_buffers, read_parameters
from vcpo_learner.model.loading import load_policy
from vcpo_learner.policy_state import policy_state, trainable_parameters

_SHARD_SIZE: Final = "5GB"


@dataclass(slots=True, eq=False)
class ModelExport:
    """Exports the model of one run. It calls no rank and no GPU, so training may go on.

    An exported model has the number format of the model that the run started from.
    """

    run: str
    settings: Model
    model: PreTrainedModel
    """Of the run's family and size, with its adapters; its parameters are not read."""
    tokenizer: PreTrainedTokenizerBase
    _dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        # `save_pretrained` writes another value into the configuration.
        self._dtype = cast("torch.dtype | None", self.model.config.dtype) or torch.float32

    @property
    def num_trained(self) -> int:
        return sum(each.numel() for each in self.model.parameters() if each.requires_grad)

    @property
    def has_adapters(self) -> bool:
        return self.settings.lora is not None

    def write_model(self, folder: Path, tensors: Path, *, step: int) -> None:
        """Write model and tokenizer so that `AutoModelForCausalLM.from_pretrained` loads them.

        With LoRA the base model is loaded and the adapters are merged into it.

        tensors: folder of `TensorFiles`. A WriteError says that the disk does not take it.
        """
        with atomic_folder(folder) as partial:
            if self.has_adapters:
                merged = _merge_adapters(self.settings, self._read_state(tensors))
                for name, parameter in merged.named_parameters():
                    parameter.data = parameter.data.to(self._dtype_of(name))
                merged.save_pretrained(partial, max_shard_size=_SHARD_SIZE)
            else:
                state = self._read_state(tensors)
                self.model.save_pretrained(partial, state_dict=state, max_shard_size=_SHARD_SIZE)
            _name_dtype(partial / "config.json", self._dtype)
            self._write_origin(partial, ExportKind.MODEL, step)

    def write_adapters(self, folder: Path, tensors: Path, *, step: int) -> None:
        from vcpo_learner.model.lora import save_adapters

        adapters = self._read_state(tensors)
        with atomic_folder(folder) as partial:
            save_adapters(self.model, adapters, self.settings, partial)
            self._write_origin(partial, ExportKind.ADAPTERS, step)

    def _read_state(self, tensors: Path) -> dict[str, torch.Tensor]:
        """Return the state that a checkpoint holds; it must be that of the model, whole."""
        shapes = parameter_shapes(tensors)
        dtype_of = (lambda _: torch.float32) if self.has_adapters else self._dtype_of
        state = {name: torch.empty(shape, dtype=dtype_of(name)) for name, shape in shapes.items()}
        buffers = read_buffers(tensors)
        found = shapes | {name: each.shape for name, each in buffers.items()}
        wanted = {name: each.shape for name, each in policy_state(self.model).items()}
        if differing := {name for name, _ in found.items() ^ wanted.items()}:
            raise DamageError(f"{tensors}: tensor {min(differing)}: does not fit the run's model")
        read_parameters(tensors, state)
        return state | buffers

    def _dtype_of(self, name: str) -> torch.dtype:
        model = self.model
        kept = set(model._keep_in_fp32_modules_strict or ())
        if self._dtype is torch.float16:
            kept |= set(model._keep_in_fp32_modules or ())
        return torch.float32 if any(each in name for each in kept) else self._dtype

    def _write_origin(self, folder: Path, kind: ExportKind, step: int) -> None:
        self.tokenizer.save_pretrained(folder)
        ExportedModel(
            kind=kind,
            run=self.run,
            step=step,
            base_model=self.settings.name,
            parameters=self.model.num_parameters(),
        ).write(folder)


def _merge_adapters(settings: Model, adapters: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    # peft takes seconds to import, and few runs need it.
    from vcpo_learner.model.lora import merge_adapters

    model, _ = load_policy(
        local_model(settings.name),
        settings.revision,
        settings.lora,
        trust_remote_code=settings.trust_remote_code,
    )
    for name, parameter in trainable_parameters(model).items():
        parameter.data = adapters[name]
    merge_adapters(model)
    return model


def _name_dtype(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    for section in (config, *(each for each in config.values() if isinstance(each, dict))):
        if section is config or "dtype" in section:
            section["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
