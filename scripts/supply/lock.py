"""A lock: the packages of an image, each with its version and the hashes of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

_PACKAGE: Final = re.compile(r"([A-Za-z0-9][\w.-]*)==(\S+)")
_HASH: Final = re.compile(r"--hash=(sha256:[0-9a-f]{64})")
PROJECT: Final = "vcpo (pyproject.toml)"
"""How uv names this project where it says who needs a package."""


class LockError(ValueError):
    """A line of a lock names no package with an exact version and the hashes of its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedPackage:
    """A package of a lock."""

    name: str
    """Canonical, such as ``ruamel-yaml``."""
    version: str
    hashes: tuple[str, ...]
    """``sha256:...`` of each file that may be installed."""
    needed_by: frozenset[str]
    """Canonical names of the packages that need it, and `PROJECT` if pyproject.toml names it."""

    @property
    def public_version(self) -> str:
        return Version(self.version).public


def read_lock(text: str) -> list[LockedPackage]:
    """Packages of a lock that uv wrote.

    Raises: LockError with the line that it cannot read, or the package without a hash.
    """
    return [_package(first, rest) for first, rest in _entries(text)]


def _entries(text: str) -> Iterator[tuple[str, list[str]]]:
    entry: list[str] = []
    for line in text.splitlines():
        if line.startswith((" ", "\t")) and entry:
            entry.append(line.strip())
        elif line.strip() and not line.startswith("#"):
            if entry:
                yield entry[0], entry[1:]
            entry = [line]
    if entry:
        yield entry[0], entry[1:]


def _package(first: str, rest: Sequence[str]) -> LockedPackage:
    words = first.removesuffix("\\").strip()
    matched = _PACKAGE.fullmatch(words)
    if matched is None:
        raise LockError(f"line {words!r} is no package with an exact version, name==version")
    hashes = [each for line in rest for each in _HASH.findall(line)]
    if not hashes:
        raise LockError(f"{words} has no --hash=sha256:...")
    return LockedPackage(
        name=canonicalize_name(matched[1]),
        version=matched[2],
        hashes=tuple(hashes),
        needed_by=frozenset(_needed_by(rest)),
    )


def _needed_by(comments: Iterable[str]) -> Iterator[str]:
    for line in comments:
        _, via, names = line.partition("# via ")
        for name in names.split(", ") if via else ():
            if name == PROJECT:
                yield name
            elif not name.startswith("-"):  # an option of uv's that names a file
                yield canonicalize_name(name)


def lock_problems(
    packages: Iterable[LockedPackage], asked: Iterable[Requirement], tested: Mapping[str, str]
) -> list[str]:
    """Sentences about what a lock has that differs from the files that it is made from.

    asked: the requirements of its image.
    tested: version of each package with which the tests ran.
    """
    locked = {package.name: package for package in packages}
    wanted: dict[str, Requirement] = {canonicalize_name(each.name): each for each in asked}
    return [
        *_bounds_problems(locked, wanted),
        *(
            f"holds {name} for pyproject.toml, which does not ask for it"
            for name, package in locked.items()
            if PROJECT in package.needed_by and name not in wanted
        ),
        *(
            f"has {name} {package.version}, deploy/constraints.txt {tested[name]}"
            for name, package in locked.items()
            if name in tested and package.public_version != tested[name]
        ),
    ]


def _bounds_problems(
    locked: Mapping[str, LockedPackage], wanted: Mapping[str, Requirement]
) -> Iterator[str]:
    for name, requirement in wanted.items():
        if name not in locked:
            yield f"lacks {name}, which pyproject.toml asks for"
        elif locked[name].version not in requirement.specifier:
            found = locked[name].version
            yield f"has {name} {found}, pyproject.toml wants {requirement.specifier}"
