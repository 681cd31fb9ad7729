"""`vcpo export`, which needs the tensor libraries and therefore runs in a module of the learner.

It replaces this process, so that its exit status and its signals are the user's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final, NoReturn

from vcpo.service.process import module_command

EXPORT_MODULES: Final = ("torch", "transformers", "vcpo_learner")


def export_arguments(*places: Path | None, **options: object) -> list[str]:
    """Return the arguments of `python -m vcpo_learner.export`: the options that are given."""
    given = {f"--{name.replace('_', '-')}": each for name, each in options.items()}
    named = [f"{name}={each}" for name, each in given.items() if type(each) in {int, str}]
    flags = [name for name, each in given.items() if each is True]
    return [*flags, *named, "--", *(str(each) for each in places if each is not None)]


def exec_export(arguments: list[str]) -> NoReturn:
    """Replace this process by the export."""
    command = module_command("vcpo_learner.export", *arguments)
    os.execv(sys.executable, command)  # noqa: S606 - our own module
