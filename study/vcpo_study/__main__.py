"""`python -m vcpo_study`: run a grid of methods, lags and seeds, and write a report."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

from vcpo.service.lifecycle import StartError, report_start_error
from vcpo_study.app import Options, run_study
from vcpo_study.cells.cell import Selection

_INTERRUPTED = 130


def main() -> int:
    """Run a study and return the exit status.

    0: every cell was run; 1: a cell failed; 2: the user must correct something; 130: interrupted.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        complete = run_study(_options(sys.argv[1:]), _say)
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
        prog="python -m vcpo_study",
        description="Runs in parallel every cell of a study that has no record yet, and writes "
        "results.md, results.json and figures. Ctrl-C loses the cells that are running; the same "
        "command resumes the study.",
    )
    parser.add_argument("file", type=Path, help="YAML file of the study (kind VCPOStudy)")
    parser.add_argument("--dir", type=Path, help="directory of records [runs/NAME OF THE FILE]")
    parser.add_argument("--output", type=Path, help="directory of the report [same as --dir]")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="cells that run at a time [cores]",
    )
    parser.add_argument(
        "--only", action="append", metavar="METHOD", help="run this method; repeatable"
    )
    parser.add_argument("--lags", action="append", type=int, help="run this lag; repeatable")
    parser.add_argument("--report-only", action="store_true", help="only write the report")
    parsed = parser.parse_args(arguments)
    if parsed.jobs < 1:
        parser.error(f"argument --jobs: {parsed.jobs} is below 1")
    output = ["--output", str(parsed.output)] if parsed.output else []
    directory = parsed.dir or Path("runs") / parsed.file.stem
    return Options(
        file=parsed.file,
        directory=directory,
        output=parsed.output or directory,
        jobs=parsed.jobs,
        selection=Selection(
            methods=frozenset(parsed.only) if parsed.only else None,
            lags=frozenset(parsed.lags) if parsed.lags else None,
        ),
        report_only=parsed.report_only,
        command=shlex.join(["vcpo", "study", str(parsed.file), *output]),
    )


if __name__ == "__main__":
    raise SystemExit(main())
