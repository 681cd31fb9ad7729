"""What an exported model says of itself: a small file beside its weights.

It tells which run the weights are of and after how many steps, so that a finished run is known for
finished, and a folder for one that may be replaced.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

EXPORT_FILE = "vcpo.json"


class ExportKind(StrEnum):
    """What a folder holds."""

    MODEL = "model"
    """A whole model, adapters melted in: `AutoModelForCausalLM.from_pretrained`."""
    ADAPTERS = "adapters"
    """Adapters beside the model that they were trained on: `PeftModel.from_pretrained`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """Where exported weights come from."""

    kind: ExportKind
    run: str
    step: int
    """Optimizer steps taken."""
    base_model: str
    """Name or directory of what the run began with."""

    def write(self, folder: Path) -> None:
        """Write it beside the weights."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        (folder / EXPORT_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read what a folder says of itself; None when it says nothing that can be read."""
        try:
            document = json.loads((folder / EXPORT_FILE).read_text(encoding="utf-8"))
            return cls(
                kind=ExportKind(document["kind"]),
                run=str(document["run"]),
                step=int(document["step"]),
                base_model=str(document["base_model"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
