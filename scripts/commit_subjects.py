"""Check that commit subjects fit a line of `git log`; `.ci/run` does it.

It looks at the commits that `main` does not have yet, and on `main` itself at the newest ones. What
a shallow clone does not have is not looked at, and without git nothing is.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LONGEST_CHARACTERS: Final = 72
NEWEST: Final = 20
"""Commits that are looked at on `main`."""
_BASES: Final = ("origin/main", "main")


def main() -> int:
    """Name each subject that is too long; return the exit status."""
    if not _git("rev-parse", "--verify", "--quiet", "HEAD"):
        sys.stdout.write("commit subjects: no git history here, so nothing is checked\n")
        return 0
    newest = [f"--max-count={NEWEST}", "HEAD"]
    # Nothing in a clone without that branch, or one too shallow to have where it began.
    merge_base = next(filter(None, (_git("merge-base", base, "HEAD") for base in _BASES)), "")
    if merge_base and merge_base != _git("rev-parse", "HEAD"):
        newest = [f"{merge_base}..HEAD"]
    status = 0
    for line in _git("log", "--no-merges", "--format=%h%x09%s", *newest).splitlines():
        name, _, subject = line.partition("\t")
        if (length := len(subject)) > LONGEST_CHARACTERS:
            status = 1
            fix = f"{LONGEST_CHARACTERS} fit; say what changed, and why in the body"
            sys.stderr.write(f"{name}: a subject of {length} characters, and {fix}: {subject}\n")
    return status


def _git(*arguments: str) -> str:
    """Return what a git command says; nothing if it fails or there is no git."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except FileNotFoundError:
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
