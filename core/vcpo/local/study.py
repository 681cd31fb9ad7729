"""The door to studies, which need the tensor libraries and so live outside the core."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

STUDY_MODULES: Final = ("torch", "transformers", "vcpo_learner", "vcpo_rollout", "vcpo_study")
"""What must be installed for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """What `vcpo study` was asked for; None and empty leave it to the study's process."""

    file: Path
    directory: Path | None
    output: Path | None
    jobs: int | None
    methods: tuple[str, ...]
    lags: tuple[int, ...]
    report_only: bool

    def arguments(self) -> list[str]:
        """The same for `python -m vcpo_study`."""
        named = {"--dir": self.directory, "--output": self.output, "--jobs": self.jobs}
        arguments = [str(self.file)]
        arguments += [f"{name}={value}" for name, value in named.items() if value is not None]
        arguments += [f"--only={method}" for method in self.methods]
        arguments += [f"--lags={lag}" for lag in self.lags]
        return [*arguments, *(["--report-only"] if self.report_only else [])]


def become_study(options: StudyOptions) -> NoReturn:
    """Turn this process into the study's, so that signals and the exit status are its own."""
    command = [sys.executable, "-m", "vcpo_study", *options.arguments()]
    os.execv(sys.executable, command)  # noqa: S606 - our own module, by our own interpreter
