"""Variance-controlled policy optimization for asynchronous RL: the torch-free core."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vcpo.local.training import Training, TrainingError

    __version__: str

__all__ = ["TrainingError", "__version__", "train"]


def __getattr__(name: str) -> object:
    """Return what takes time to find, when it is asked for."""
    if name == "__version__":
        from importlib.metadata import version

        return version("vcpo")
    if name == "TrainingError":
        from vcpo.local.training import TrainingError

        return TrainingError
    raise AttributeError(f"module 'vcpo' has no attribute {name!r}")


def train(
    file: str | Path,
    *,
    changes: Mapping[str, object] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
) -> Training:
    """Start a run on this machine, as `vcpo run` does; return an iterator over its steps.

    The run ends with the program: iterate to its last step, or call `wait()`.

    file: Run file.
    changes: Values of fields in place of the file's, such as {"algorithm.maxPolicyLagSteps": 12}.
    run_dir: Directory for records, checkpoints and the model; by default runs/NAME-NNN.
    resume: Whether to go on from the newest checkpoint in `run_dir`.
        vcpo.api.SpecError: with all problems of the file.
    """
    from vcpo.local.training import Training  # the services import this package, and no host

    folder = None if run_dir is None else Path(run_dir)
    return Training(Path(file), changes or {}, folder, resume=resume)
