"""Check that commit subjects fit a line of `git log`; `.ci/run` does it.

It looks at the commits that `main` does not have yet, and on `main` itself at the newest ones. What
a shallow clone does not have is not looked at, and without git nothing is.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LONGEST_CHARACTERS: Final = 72
NEWEST: Final = 20
"""Commits that are looked at on `main`."""
_BASES: Final = ("origin/main", "main")


def main(root: Path = ROOT) -> int:
    """Name each subject that is too long; return the exit status."""
    found = commits(root)
    if found is None:
        sys.stdout.write("commit subjects: no git history here, so nothing is checked\n")
        return 0
    for line in too_long(found):
        sys.stderr.write(f"{line}\n")
    return int(any(too_long(found)))


def commits(root: Path) -> list[tuple[str, str]] | None:
    """Return hash and subject of the commits to look at; None without git."""
    if _git(root, "rev-parse", "--verify", "--quiet", "HEAD") is None:
        return None
    newest = [f"--max-count={NEWEST}", "HEAD"]
    for base in _BASES:
        # Nothing in a clone without that branch, or one too shallow to have where it began.
        if merge_base := _git(root, "merge-base", base, "HEAD"):
            if merge_base != _git(root, "rev-parse", "HEAD"):
                newest = [f"{merge_base}..HEAD"]
            break
    logged = _git(root, "log", "--no-merges", "--format=%h%x09%s", *newest) or ""
    return [(name, subject) for name, _, subject in map(_split_line, logged.splitlines())]


def too_long(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each commit with a subject that is too long."""
    for name, subject in found:
        if len(subject) > LONGEST_CHARACTERS:
            yield (
                f"{name}: a subject of {len(subject)} characters, and {LONGEST_CHARACTERS} fit; say"
                f" what changed, and why in the body: {subject}"
            )


def _split_line(line: str) -> tuple[str, str, str]:
    return line.partition("\t")


def _git(root: Path, *arguments: str) -> str | None:
    """Return what a git command says; None if it fails or there is no git."""
    try:
        asked = subprocess.run(  # noqa: S603 - arguments of our own
            ["git", "-C", str(root), *arguments],  # noqa: S607 - the git of the machine
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
