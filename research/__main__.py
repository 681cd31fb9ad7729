"""`python -m research`: run studies cell by cell, and write their report."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import sys
from pathlib import Path

from research.app import Options, run_studies
from research.cells.cell import Part, Selection
from vcpo.service.lifecycle import StartError, report_start_error

_INTERRUPTED = 130


def main() -> int:
    """Run studies and return the exit status.

    0: no cell failed; 1: a cell failed; 2: the user must correct something; 130: interrupted.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        complete = run_studies(_options(sys.argv[1:]), _say)
    except StartError as error:
        return report_start_error(error)
    except KeyboardInterrupt:
        _say("interrupted; the same command resumes the study")
        return _INTERRUPTED
    return 0 if complete else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _options(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m research",
        description="Runs in parallel every cell of the studies that has no record yet, and writes "
        "results.md, results.json and two figures a study. Ctrl-C loses the running cells; "
        "the same command resumes the studies.",
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="YAML file of a study (kind VCPOStudy)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs") / "studies",
        help="directory of the report; records are in records/NAME below it [%(default)s]",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="cells that run at a time [cores]",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where cells compute; the jobs share a GPU's memory [%(default)s]",
    )
    parser.add_argument("--hours", type=float, help="start no cell after this time [no limit]")
    parser.add_argument(
        "--part",
        action="append",
        choices=[part.value for part in Part],
        help="run this part; repeatable",
    )
    parser.add_argument(
        "--only", action="append", metavar="METHOD", help="run this method; repeatable"
    )
    parser.add_argument(
        "--lags",
        action="append",
        type=int,
        help="run this lag of plane and claims; repeatable",
    )
    parser.add_argument("--report-only", action="store_true", help="only write the report")
    parsed = parser.parse_args(arguments)
    if parsed.jobs < 1:
        parser.error(f"argument --jobs: {parsed.jobs} is below 1")
    if parsed.hours is not None and not 0.0 < parsed.hours < math.inf:
        parser.error(f"argument --hours: {parsed.hours} is no positive number of hours")
    files = [str(file) for file in parsed.files]
    return Options(
        files=parsed.files,
        output=parsed.output,
        jobs=parsed.jobs,
        hours=parsed.hours,
        selection=Selection(
            parts=frozenset(map(Part, parsed.part)) if parsed.part else None,
            methods=frozenset(parsed.only) if parsed.only else None,
            lags=frozenset(parsed.lags) if parsed.lags else None,
        ),
        report_only=parsed.report_only,
        device=parsed.device,
        command=shlex.join(["python", "-m", "research", *files, "--output", str(parsed.output)]),
    )


if __name__ == "__main__":
    raise SystemExit(main())
