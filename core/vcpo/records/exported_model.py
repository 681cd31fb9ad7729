"""Origin of an exported model: a small JSON file beside its weights.

The file names the run and the step of the weights. With it a run is recognized as complete, and a
folder is recognized as an export that may be replaced.
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

EXPORT_FILE = "vcpo.json"


class ExportKind(StrEnum):
    """Content of an export's folder."""

    MODEL = "model"
    """A whole model with merged adapters; load with `AutoModelForCausalLM.from_pretrained`."""
    ADAPTERS = "adapters"
    """LoRA adapters only; load with `PeftModel.from_pretrained`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """Origin of exported weights."""

    kind: ExportKind
    run: str
    step: int
    base_model: str
    """Name or directory of the run's initial model."""
    parameters: int
    """Parameters of the run's model, its adapters included."""

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=1) + "\n"
        (folder / EXPORT_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the file of a folder; return None if there is no valid file."""
        try:
            document = json.loads((folder / EXPORT_FILE).read_text(encoding="utf-8"))
            return cls(
                kind=ExportKind(document["kind"]),
                run=str(document["run"]),
                step=int(document["step"]),
                base_model=str(document["base_model"]),
                parameters=int(document["parameters"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
