"""`python -m vcpo_rollout.environments < run.yaml`: checks that a run's environment can be found.

It imports the environment's class and checks the names of its parameters. It makes no instance,
since that may load data. The exit status is the result; an error reads as a worker's does.
"""

import sys

from vcpo.service.lifecycle import StartError, report_start_error, start_errors
from vcpo.spec import parse_run
from vcpo_rollout.environments.environment import find_environment, import_from_run_folder


def main() -> int:
    """Read a run from standard input; return 0 when its environment can be found."""
    try:
        with start_errors():
            run = parse_run(sys.stdin.read(), source="standard input")
            import_from_run_folder(run)
            find_environment(run.spec.environment.name, run.spec.environment.parameters)
    except StartError as error:
        return report_start_error(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
