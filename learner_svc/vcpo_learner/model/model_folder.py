"""Folders that other programs load: a model, or adapters of a model."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.records.exported_model import ExportedModel, ExportKind
from vcpo.spec import VCPORun
from vcpo_learner.model.disk import atomic_folder
from vcpo_learner.model.loading import policy_tensors


class ModelExport:
    """Exports the model of one run. Owner: the tensor thread."""

    def __init__(
        self, run: VCPORun, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._run = run
        self._model = model
        self._tokenizer = tokenizer

    @property
    def has_adapters(self) -> bool:
        """Whether the run trains LoRA adapters."""
        return self._run.spec.model.lora is not None

    def write_model(self, folder: Path, *, step: int) -> None:
        """Write model and tokenizer so that `AutoModelForCausalLM.from_pretrained` loads them.

        With LoRA it merges the adapters; the model cannot be trained any more after that.

        Raises:
            DiskFullError: if the disk has no room for it; the call may be repeated.
        """
        if self.has_adapters:
            # peft takes seconds to import, and few runs need it.
            from vcpo_learner.model.lora import merge_adapters

            merge_adapters(self._model)
        size_bytes = sum(each.numel() * each.element_size() for each in self._model.parameters())
        with atomic_folder(folder, what="the model", needed_bytes=size_bytes) as partial:
            self._model.save_pretrained(partial)
            self._tokenizer.save_pretrained(partial)
            self._origin(ExportKind.MODEL, step).write(partial)

    def write_adapters(self, folder: Path, *, step: int) -> None:
        """Write adapters and tokenizer so that `PeftModel.from_pretrained` loads them.

        Raises:
            DiskFullError: if the disk has no room for it; the call may be repeated.
        """
        from vcpo_learner.model.lora import save_adapters

        tensors = policy_tensors(self._model)
        size_bytes = sum(each.numel() * each.element_size() for each in tensors.values())
        with atomic_folder(folder, what="the adapters", needed_bytes=size_bytes) as partial:
            save_adapters(self._model, tensors, self._run.spec.model, partial)
            self._tokenizer.save_pretrained(partial)
            self._origin(ExportKind.ADAPTERS, step).write(partial)

    def _origin(self, kind: ExportKind, step: int) -> ExportedModel:
        return ExportedModel(
            kind=kind,
            run=self._run.metadata.name,
            step=step,
            base_model=self._run.spec.model.name,
        )
