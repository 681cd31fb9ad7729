"""The door to exporting a model, which needs the tensor libraries and so lives outside the core."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

EXPORT_MODULES: Final = ("torch", "transformers", "vcpo_learner")
"""What must be installed for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What `vcpo export` was asked for."""

    run_dir: Path
    step: int | None
    """None is the newest checkpoint that is whole."""
    adapters: bool
    """Adapters beside their model, in place of one model."""
    output: Path | None
    """None is a folder of the run directory, named by the step."""

    def arguments(self) -> list[str]:
        """The same for `python -m vcpo_learner.export`."""
        named = {"--step": self.step, "--output": self.output}
        arguments = [f"{name}={value}" for name, value in named.items() if value is not None]
        return [*arguments, *(["--adapters"] if self.adapters else []), "--", str(self.run_dir)]


def become_export(options: ExportOptions) -> NoReturn:
    """Turn this process into the exporting one, so that the exit status is its own."""
    command = [sys.executable, "-m", "vcpo_learner.export", *options.arguments()]
    os.execv(sys.executable, command)  # noqa: S606 - our own module, by our own interpreter
