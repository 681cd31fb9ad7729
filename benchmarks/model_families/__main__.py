"""Judge families of transformers at tiny size, and keep what was found in `results.md` here.

A family's model has random parameters, and random state beside them, such as the correction biases
of a router. Responses cross every length that its configuration names. Each question is a column:
`benchmarks.model_families.table` says what it measures and what is right. A family runs in
processes of its own, so a crash or a hang is a cell.

    python -m benchmarks.model_families
    python -m benchmarks.model_families --columns vllm --families qwen3,gpt_oss
    python -m benchmarks.model_families --minutes 10

A start of vLLM takes a quarter of a minute, so its column is measured only if it is named. Columns
and families that a run does not measure keep their cells of the run before.

The last line printed is JSON: the number of `families`, of those that `agree`, are `refused` and
are `wrong`, and the names of the last two; `worsened` are cells that were right on the page and are
so no more. The exit status is 1 if there are such cells, or if this run found
a cell wrong.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import transformers

from benchmarks.harness.measures import parser_of
from benchmarks.model_families.families import FAMILIES, Family
from benchmarks.model_families.judgement import judge_family
from benchmarks.model_families.table import (
    COLUMNS,
    Row,
    Table,
    Verdict,
    judge_row,
    read,
    updated,
    worsened,
    write_page,
)

PAGE: Final = Path(__file__).resolve().parent / "results.md"
_NAMES: Final = [column.name for column in COLUMNS]
_BY_DEFAULT: Final = [name for name in _NAMES if name != "vllm"]
_LIMIT_S: Final = 300.0
"""Longest time of one process of a family."""


def judge_families(
    families: Sequence[Family], columns: frozenset[str], minutes: float, before: Table
) -> Iterator[tuple[str, Row]]:
    """Judge families one after another until the time is up; yields each with its row.

    A line is printed for each of them.
    """
    deadline_s = time.monotonic() + 60.0 * minutes
    for number, family in enumerate(families, start=1):
        if time.monotonic() > deadline_s:
            print(f"the {minutes:g} minutes are over: {len(families) - number + 1} are left out")
            return
        started_s = time.monotonic()
        row = judge_family(family, columns, _LIMIT_S, before.rows.get(family.name))
        cells = ", ".join(f"{name}: {cell}" for name, cell in row.items())
        seconds = time.monotonic() - started_s
        print(f"{number}/{len(families)} {family.name}: {cells} ({seconds:.1f} s)", flush=True)
        yield family.name, row


def summary(before: Table, after: Table) -> dict[str, Any]:
    """Return the numbers of the last line."""
    found = {verdict: after.families(verdict) for verdict in Verdict}
    return {
        "families": len(after.rows),
        "agree": len(found[Verdict.AGREES]),
        "refused": len(found[Verdict.REFUSED]),
        "wrong": len(found[Verdict.WRONG]),
        "refused_names": found[Verdict.REFUSED],
        "wrong_names": found[Verdict.WRONG],
        "worsened": worsened(before, after),
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, minutes=(60.0, "start no family after them"))
    parser.add_argument("--families", help="names, with commas between them; all if unset")
    parser.add_argument("--columns", nargs="+", choices=_NAMES, default=_BY_DEFAULT)
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to read and to write")
    arguments = parser.parse_args()
    names = [family.name for family in FAMILIES]
    wanted = arguments.families.split(",") if arguments.families else names
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        parser.error(f"argument --families: {unknown} are none of {', '.join(names)}")
    arguments.families = [family for family in FAMILIES if family.name in wanted]
    return arguments


def main() -> None:
    """Judge, write the page after each family, and print the last line."""
    arguments = parse_arguments()
    page: Path = arguments.page
    before = read(page.read_text(encoding="utf-8")) if page.exists() else Table()
    transformers.logging.set_verbosity_error()
    names = [family.name for family in FAMILIES]
    after = updated(before, Table(), names)
    columns = frozenset(arguments.columns)
    is_wrong = False
    for name, row in judge_families(arguments.families, columns, arguments.minutes, before):
        is_wrong |= judge_row(row) is Verdict.WRONG
        after = updated(after, Table(rows={name: row}), names)
        write_page(after, page)
    found = summary(before, after)
    print(json.dumps(found))
    sys.exit(1 if is_wrong or found["worsened"] else 0)


if __name__ == "__main__":
    main()
