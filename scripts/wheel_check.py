"""Check what `pip install .` gives: the wheel's contents, and its command in an empty environment.

`.ci/run` does it. It builds the wheel, installs it with what it needs without an extra, and has the
command print the schema and check a run file. It takes an index of packages, and a minute.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_HEAVY: Final = ("torch", "transformers", "vllm", "kopf")
"""What only extras bring."""


def main() -> int:
    """Build, look and try; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            problems = list(differences(set(archive.namelist()), wheel_of_tree()))
        for problem in problems:
            sys.stderr.write(f"{wheel.name}: {problem}\n")
        if not problems:
            try_command(wheel, Path(folder) / "venv")
    return int(bool(problems))


def build(folder: Path) -> Path:
    """Build the wheel into a folder; return it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    _run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def wheel_of_tree() -> set[str]:
    """Return the files that the wheel must hold: those of its packages that git knows."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    known = _run("git", "-C", str(ROOT), "ls-files", *packages)
    return {file.partition("/")[2] for file in known.splitlines()}


def differences(found: set[str], expected: set[str]) -> Iterator[str]:
    """Yield what a wheel has beside its metadata and should not, and what it lacks."""
    files = {name for name in found if ".dist-info/" not in name}
    for name in sorted(files - expected):
        yield f"{name} is no part of the package"
    for name in sorted(expected - files):
        yield f"{name} is missing"


def try_command(wheel: Path, folder: Path) -> None:
    """Install the wheel without an extra, and have its command do what needs none."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel))
    installed = _run(python, "-m", "pip", "list", "--format", "freeze")
    for name in _HEAVY:
        if f"{name}==" in installed:
            raise ValueError(f"{name} is installed without an extra")
    command = str(folder / "bin" / "vcpo")
    _run(command, "schema")
    sys.stdout.write(_run(command, "validate", str(ROOT / "examples" / "sort_digits.yaml")))


def _run(*command: str) -> str:
    """Run a command; return what it prints."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - our own


if __name__ == "__main__":
    sys.exit(main())
