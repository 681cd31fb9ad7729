"""`vcpo render`: the objects that a run would get in a cluster."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from vcpo.cli.console import fail

_OPERATOR = "vcpo_operator"
_PACKAGES = ("kopf", "kubernetes")


def render(
    file: Annotated[Path, typer.Argument(help="Run file (YAML).", show_default=False)],
    learner_image: Annotated[str | None, typer.Option(help="Image of the learner.")] = None,
    rollout_image: Annotated[str | None, typer.Option(help="Image of the workers.")] = None,
) -> None:
    """Print the objects that a run would get in a cluster; no cluster is needed."""
    if any(importlib.util.find_spec(each) is None for each in _PACKAGES):
        fail("what the operator needs is not installed; pip install 'vcpo[operator]' installs it")
    given = {"--learner-image": learner_image, "--rollout-image": rollout_image}
    options = [f"{name}={image}" for name, image in given.items() if image is not None]
    command = [sys.executable, "-m", f"{_OPERATOR}.render", str(file), *options]
    raise typer.Exit(subprocess.run(command, check=False).returncode)  # noqa: S603 - our own
