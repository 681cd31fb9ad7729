"""`python -m vcpo_rollout.engines.engine_trial < run.yaml`: tries a run's own engines.

It imports their classes and checks methods and arguments, as a worker does at its start, and loads
no model. It ends with 0, or with `CANNOT_START`; the message then follows the mark of start errors
in the log, and begins with the field.
"""

from __future__ import annotations

import sys

from vcpo.api import parse_run
from vcpo.service.lifecycle import StartError, report_start_error, start_errors
from vcpo.service.plugins import import_from_run_folder
from vcpo_rollout.engines.factory import find_engine


def main() -> int:
    """Read a run from standard input, try its own engines, and return the exit status."""
    try:
        with start_errors():
            run = parse_run(sys.stdin.read(), source="standard input")
            import_from_run_folder(run)
            for group in run.spec.rollouts:
                if ":" in group.engine_name:
                    find_engine(run.spec, group)
    except StartError as error:
        return report_start_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
