"""`vcpo export`, which needs the tensor libraries and therefore runs in a module of the learner.

It replaces this process, so that its exit status and its signals are the user's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from vcpo.service.process import module_command

EXPORT_MODULES: Final = ("torch", "transformers", "vcpo_learner")


def export_arguments(
    source: Path, directory: Path | None, *, step: int | None, best: bool, adapters: bool
) -> list[str]:
    """Return the arguments of `python -m vcpo_learner.export`, for the options of `vcpo export`."""
    flags = {"--best": best, "--adapters": adapters, f"--step={step}": step is not None}
    places = [source] if directory is None else [source, directory]
    return [*(flag for flag, is_set in flags.items() if is_set), "--", *map(str, places)]


def exec_export(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the export."""
    command = module_command("vcpo_learner.export", *arguments)
    os.execv(sys.executable, command)  # noqa: S606 - our own module
