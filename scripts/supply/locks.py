"""Write the locks of the images, ``deploy/locks``; with ``--check`` only compare.

A lock holds every package of an image with one version and the hashes of its files, so that a build
installs the files that were meant or none. Versions are those of ``deploy/constraints.txt``;
packages that only CUDA builds bring keep the version that the lock has, unless ``--upgrade`` is
given. uv resolves, for Linux with the glibc of the base image. The index of packages is uv's own;
PyTorch's builds for CPUs are looked for where ``PIP_FIND_LINKS`` or ``PIP_EXTRA_INDEX_URL`` points,
as ``scripts/install.sh`` does.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.supply.images import (
    BUILD_LOCK,
    CONSTRAINTS,
    IMAGES,
    LOCKS,
    PYPROJECT,
    ROOT,
    Image,
    asked_of_image,
    pyproject,
    tested_versions,
)

CPU_OVERRIDES: Final = LOCKS / "cpu.overrides.txt"
"""What the images for CPUs hold differently, whatever their packages ask for."""

_PROJECT: Final = "vcpo (pyproject.toml)"
"""How uv names this project where it says who needs a package."""
_PACKAGE: Final = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>\S+) \\\n"
    r"(?P<hashes>(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
    r"    # via (?P<needed_by>.*)\n"
)
_UV: Final = (sys.executable, "-m", "uv", "pip", "compile")
_OPTIONS: Final = (
    *("--generate-hashes", "--python-version", "3.11"),
    *("--python-platform", "x86_64-manylinux_2_36"),
    *("--only-binary", ":all:", "--annotation-style", "line"),
    *("--custom-compile-command", "make locks", "--quiet"),
)


def compile_command(image: Image) -> list[str]:
    """Command that writes the lock of an image, run in the root of the tree."""
    extras = [word for extra in image.extras for word in ("--extra", extra)]
    places = _places_of_cpu_builds() if image.for_cpus else ()
    return [*_UV, _relative(PYPROJECT), *extras, *places]


def _places_of_cpu_builds() -> Iterator[str]:
    yield from ("--override", _relative(CPU_OVERRIDES))
    for place in os.environ.get("PIP_FIND_LINKS", "").split():
        yield from ("--find-links", place)
    for place in os.environ.get("PIP_EXTRA_INDEX_URL", "").split():
        # Each package at the version that is asked for, from whichever index has it, as pip does.
        yield from ("--extra-index-url", place, "--index-strategy", "unsafe-best-match")


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def write_lock(command: Sequence[str], lock: Path, *, upgrade: bool, stdin: str = "") -> None:
    """Let uv resolve, and write the lock.

    Raises: subprocess.CalledProcessError; uv has then said why.
    """
    constraints = ("--constraint", _relative(CONSTRAINTS))
    more = ("--upgrade",) if upgrade else ()
    subprocess.run(  # noqa: S603 - a fixed command
        [*command, *constraints, *_OPTIONS, *more, "--output-file", _relative(lock)],
        cwd=ROOT,
        input=stdin,
        stdout=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    sys.stdout.write(f"{_relative(lock)}: {len(read_lock(lock.read_text()))} packages\n")


def write_locks(*, upgrade: bool) -> None:
    """Write all of them."""
    for image in IMAGES:
        write_lock(compile_command(image), image.lock, upgrade=upgrade)
    needs = "\n".join(pyproject()["build-system"]["requires"])
    write_lock([*_UV, "-"], BUILD_LOCK, upgrade=upgrade, stdin=needs)


def read_lock(text: str) -> dict[str, tuple[str, list[str]]]:
    """Return version and who needs it, by canonical name, of each package of a lock of uv.

    Raises: ValueError with the line that names no version with the hashes of its files.
    """
    lines = (line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    rest, found = "".join(lines), {}
    while rest:
        package = _PACKAGE.match(rest)
        if package is None:
            line = rest.partition("\n")[0]
            raise ValueError(f"line {line!r} is no name==version with --hash=sha256:...")
        needed_by = package["needed_by"].split(", ")
        found[canonicalize_name(package["name"])] = package["version"], needed_by
        rest = rest[package.end() :]
    return found


def lock_problems(
    text: str, asked: Sequence[Requirement], tested: Mapping[str, str]
) -> Iterator[str]:
    """Yield sentences about what a lock has that differs from the files that it is made from.

    asked: the requirements of its image.
    tested: version of each package with which the tests ran.
    """
    locked = read_lock(text)
    wanted: dict[str, Requirement] = {canonicalize_name(each.name): each for each in asked}
    for name, requirement in wanted.items():
        if name not in locked:
            yield f"lacks {name}, which pyproject.toml asks for"
        elif (version := locked[name][0]) not in requirement.specifier:
            yield f"has {name} {version}, pyproject.toml wants {requirement.specifier}"
    for name, (version, needed_by) in locked.items():
        if _PROJECT in needed_by and name not in wanted:
            yield f"holds {name} for pyproject.toml, which does not ask for it"
        if name in tested and Version(version).public != tested[name]:
            yield f"has {name} {version}, deploy/constraints.txt {tested[name]}"


def found_problems() -> Iterator[str]:
    """Yield sentences about the locks of the tree, each with its file."""
    table, tested = pyproject(), tested_versions()
    asked = {image.lock: asked_of_image(image, table["project"]) for image in IMAGES}
    asked[BUILD_LOCK] = [Requirement(text) for text in table["build-system"]["requires"]]
    for lock, requirements in asked.items():
        try:
            for problem in lock_problems(lock.read_text(encoding="utf-8"), requirements, tested):
                yield f"{_relative(lock)} {problem}"
        except (OSError, ValueError) as error:
            yield f"{_relative(lock)}: {error}"


def main() -> int:
    """Write or check; the exit status is 1 when a lock does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on drift")
    upgrade = "newest versions of what has no tested version"
    parser.add_argument("--upgrade", action="store_true", help=upgrade)
    arguments = parser.parse_args()
    if not arguments.check:
        try:
            write_locks(upgrade=arguments.upgrade)
        except subprocess.CalledProcessError as error:
            sys.stderr.write(
                "uv found no set of versions (above). For torch on CPUs, set PIP_FIND_LINKS"
                " or PIP_EXTRA_INDEX_URL to a place that has it (pytorch.org, Get Started, CPU).\n"
            )
            return error.returncode
    problems = list(found_problems())
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if problems:
        sys.stderr.write("Fix: make locks\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
