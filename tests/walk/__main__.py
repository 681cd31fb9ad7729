"""Make the mistakes of a first day with the installed command: `python -m tests.walk [--json]`.

Each must end in a sentence that names field, value and fix, with its exit status, in a minute, and
leave nothing behind. Arguments choose mistakes by words of their names. It takes some minutes.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.walk.mistakes import MISTAKES
from tests.walk.walk import Walked, walk


def main() -> int:
    """Make the mistakes; return 1 if one was unclear or left something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="Only mistakes whose names have one of them.")
    parser.add_argument("--json", action="store_true", help="Print the sums as a line of JSON.")
    options = parser.parse_args()
    walked = []
    for mistake in MISTAKES:
        if options.words and not any(word in mistake.name for word in options.words):
            continue
        with tempfile.TemporaryDirectory(prefix="vcpo-walk-") as folder:
            walked.append(walk(mistake, Path(folder)))
        for line in _lines(walked[-1]):
            sys.stderr.write(f"{line}\n")
    if options.json:
        sys.stdout.write(f"{json.dumps(sums(walked))}\n")
    return int(any(each.unclear or each.left for each in walked))


def sums(walked: list[Walked]) -> dict[str, float]:
    """Return what the walk amounts to."""
    return {
        "mistakes": len(walked),
        "clear": sum(not each.unclear for each in walked),
        "left_behind": sum(len(each.left) for each in walked),
        "seconds_to_cause_max": round(max((each.seconds for each in walked), default=0.0), 1),
    }


def _lines(walked: Walked) -> Iterator[str]:
    verdict = "UNCLEAR" if walked.unclear else "clear"
    yield f"{verdict:8}{walked.seconds:6.1f} s  {walked.mistake.name}"
    yield from (f"          {each}" for each in walked.unclear)
    yield from (f"          left behind: {each}" for each in walked.left)
    if walked.unclear:
        yield from (f"        | {line}" for line in walked.said.splitlines())


if __name__ == "__main__":
    sys.exit(main())
