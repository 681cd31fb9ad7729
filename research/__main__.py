"""`python -m research`: run studies cell by cell, and write their report."""

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

from research.app import Options, check_pages, run_studies
from vcpo.service.lifecycle import StartError, report_start_error

_INTERRUPTED = 130
_ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run studies and return the exit status.

    0: all is well; 1: a cell failed or a page differs; 2: the user must correct something;
    130: interrupted.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = _options()
        complete = run_studies(options, _say) if options else check_pages(_ROOT, _say)
    except StartError as error:
        return report_start_error(error)
    except KeyboardInterrupt:
        _say("interrupted; the same command resumes the study")
        return _INTERRUPTED
    return 0 if complete else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _options() -> Options | None:
    """Return the options of a run of studies; None to check the pages."""
    parser = argparse.ArgumentParser(
        prog="python -m research",
        description="Runs in parallel every cell of the studies that has no record yet, and writes "
        "results.md, results.json and two figures a study. Ctrl-C loses the running cells; "
        "the same command resumes the studies.",
    )
    add = parser.add_argument
    add("files", metavar="FILE", nargs="*", type=Path, help="study (YAML, kind VCPOStudy)")
    output = "directory of the report; records are in records/NAME below it [%(default)s]"
    add("--output", type=Path, default=Path("runs/studies"), help=output)
    add("--jobs", type=int, default=os.cpu_count() or 1, help="cells that run at a time [cores]")
    device = "where cells compute; the jobs share a GPU's memory [%(default)s]"
    add("--device", choices=["cpu", "cuda"], default="cpu", help=device)
    add("--report-only", action="store_true", help="only write the report")
    add("--check", action="store_true", help="only check the pages' numbers against the records")
    parsed = parser.parse_args()
    if vars(parsed).pop("check"):
        return None
    if parsed.jobs < 1:
        parser.error(f"argument --jobs: {parsed.jobs} is below 1")
    files = map(str, parsed.files)
    command = shlex.join(["python", "-m", "research", *files, "--output", str(parsed.output)])
    return Options(**vars(parsed), command=command)


if __name__ == "__main__":
    raise SystemExit(main())
