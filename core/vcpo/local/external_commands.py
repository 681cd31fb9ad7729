"""`vcpo export`, which needs the tensor libraries and therefore runs in a module of the learner.

It replaces this process, so that its exit status and its signals are the user's.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

EXPORT_MODULES: Final = ("torch", "transformers", "vcpo_learner")
"""Modules that `vcpo export` needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `vcpo export`."""

    source: Path
    """Run directory, or one checkpoint."""
    directory: Path | None
    """Folder to write; None is `exports/step-N` in the run directory."""
    step: int | None
    """Step of the checkpoint; None is the newest valid one."""
    best: bool
    """Whether to take the best-evaluated checkpoint."""
    adapters: bool
    """Whether to write LoRA adapters and not a merged model."""

    def arguments(self) -> list[str]:
        """Return the arguments of `python -m vcpo_learner.export`."""
        flags = {"--best": self.best, "--adapters": self.adapters}
        arguments = [flag for flag, is_set in flags.items() if is_set]
        if self.step is not None:
            arguments.append(f"--step={self.step}")
        places = [self.source] if self.directory is None else [self.source, self.directory]
        return [*arguments, "--", *map(str, places)]


def exec_export(options: ExportOptions) -> NoReturn:
    """Replace this process by the export."""
    _exec_module("vcpo_learner.export", options.arguments())


def _exec_module(module: str, arguments: list[str]) -> NoReturn:
    command = [sys.executable, "-m", module, *arguments]
    os.execv(sys.executable, command)  # noqa: S606 - our own module, by our own interpreter
