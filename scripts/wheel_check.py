"""Check what is published: contents of sdist and wheel, and the command in empty environments.

`.ci/run` does it. It builds the sdist, and the wheel from it; installs the wheel with what it needs
without an extra, and has the command print the schema and check a run file; and begins a task in
another environment, tries it and trains a model, with the third-party packages of this one. It
takes an index of packages, and a minute or two. With --base the last part is left out, for
versions of Python for which nothing else is installed.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_HEAVY: Final = ("torch", "transformers", "vllm", "kopf")
"""What only extras bring."""
_PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")


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
            if "--base" not in sys.argv:
                try_first_run(wheel, Path(folder) / "first")
    return int(bool(problems))


def build(folder: Path) -> Path:
    """Build the sdist into a folder, and from it the wheel; return the wheel."""
    tools = folder / "tools"
    _run(*_PIP, "install", "--quiet", "--target", str(tools), "hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    _run(*command, cwd=ROOT, environment={"PYTHONPATH": str(tools)})
    (sdist,) = folder.glob("*.tar.gz")
    _run(*_PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sdist))
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
    _run(python, *_PIP[1:], "install", "--quiet", str(wheel))
    installed = _run(python, "-m", "pip", "list", "--format", "freeze")
    for name in _HEAVY:
        if f"{name}==" in installed:
            raise ValueError(f"{name} is installed without an extra")
    command = str(folder / "bin" / "vcpo")
    _run(command, "schema")
    sys.stdout.write(_run(command, "validate", str(ROOT / "examples" / "sort_digits.yaml")))


def try_first_run(wheel: Path, folder: Path) -> None:
    """Begin a task with the wheel's command, try it, and train a model in a few steps."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    _run(python, *_PIP[1:], "install", "--quiet", "--no-deps", str(wheel))
    # The folder's own .pth files are not read, so no editable install of this tree is found.
    packages = sysconfig.get_path("purelib")
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "third_party.pth").write_text(packages + "\n", encoding="utf-8")
    code = "import vcpo, vcpo_learner; print(vcpo.__file__, vcpo_learner.__file__)"
    shown = _run(python, "-c", code)
    if not all(Path(path).is_relative_to(own) for path in shown.split()):
        raise ValueError(f"the wheel's packages are not those that are imported: {shown}")
    vcpo = str(folder / "bin" / "vcpo")
    model = f"--model={ROOT / 'examples' / 'models' / 'tiny'}"
    _run(vcpo, "init", "sums", model, cwd=folder)
    # The smallest model there is cannot add, so nothing but this teaches it anything.
    reward = "def reward(prompt, response):\n    return len(response) / 100\n"
    (folder / "sums.py").write_text(reward, encoding="utf-8")
    _run(vcpo, "try", "sums.yaml", "--prompts=2", cwd=folder)
    _run(vcpo, "run", "sums.yaml", "--steps=3", "--set=evaluation.prompts=8", cwd=folder)
    if not (folder / "runs" / "sums-001" / "model" / "config.json").exists():
        raise ValueError("the first run left no model")


def _run(
    *command: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Run a command; return what it prints."""
    return subprocess.run(  # noqa: S603 - our own
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
