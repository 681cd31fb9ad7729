"""kubectl, as this project calls it: it has the user's access to the cluster already."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class KubectlError(Exception):
    """kubectl is missing or refused; the message has its words, or the cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The namespaces that are asked for."""

    namespace: str | None = None
    """None is the namespace of the current context."""
    is_all: bool = False

    def arguments(self) -> list[str]:
        """Return kubectl's arguments."""
        if self.is_all:
            return ["--all-namespaces"]
        return [] if self.namespace is None else [f"--namespace={self.namespace}"]


def kubectl_output(arguments: Sequence[str]) -> str:
    """Return what kubectl prints.

    Raises: KubectlError.
    """
    _require_kubectl()
    command = ["kubectl", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if ran.returncode != 0:
        said = ran.stderr.strip().rpartition("\n")[2]  # lines before it are of its libraries
        raise KubectlError(f"kubectl {' '.join(arguments)}: {said}")
    return ran.stdout


def kubectl_lines(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the lines that kubectl prints, as they come; its errors go to the terminal.

    Raises: KubectlError.
    """
    _require_kubectl()
    command = ["kubectl", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.rstrip("\n")
        finally:
            process.terminate()
    if process.returncode > 0:
        raise KubectlError(f"kubectl {' '.join(arguments)} ended with status {process.returncode}")


def _require_kubectl() -> None:
    if shutil.which("kubectl") is None:
        raise KubectlError(
            "kubectl is not installed: install it (https://kubernetes.io/docs/tasks/tools), or give"
            " run directories"
        )
