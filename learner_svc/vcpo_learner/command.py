"""The command line of the learner, `python -m vcpo_learner`, and its exit status."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from vcpo.service import logs
from vcpo.service.lifecycle import (
    RANK_LOST,
    StartError,
    add_service_options,
    check_driver,
    report_start_error,
    start_errors,
    wake_at_parent_exit,
)
from vcpo.wire.access.tls import add_tls_options
from vcpo.wire.phase import RunPhase
from vcpo_learner.app import run_learner
from vcpo_learner.device import let_segments_grow
from vcpo_learner.follower import run_follower
from vcpo_learner.options import Options
from vcpo_learner.ranks.ranks import LostRankError, RankEnvironment


def main() -> int:
    """Parse the command line and train; return the exit status.

    0 if the run is complete, 1 if it failed, 2 if the user must correct something, 69 if another
    rank was lost, and `--drained-status` if the run was drained. A rank other than 0 ends with 0
    when rank 0 ends it.
    """
    wake_at_parent_exit()
    arguments = vars(_parse_arguments())
    let_segments_grow(os.environ)
    drained_status: int = arguments.pop("drained_status")
    if not sys.stderr.isatty():
        # In a log file a progress bar is one long line that hides the last message.
        disable_progress_bar()  # type: ignore[no-untyped-call] # the library does not type it
    try:
        with start_errors():
            logs.configure("learner")
        check_driver()
        environment = RankEnvironment.from_variables(os.environ)
        if environment.rank > 0:
            asyncio.run(run_follower(Options(**arguments), environment))
            return 0
        phase = asyncio.run(run_learner(Options(**arguments), environment))
    except StartError as error:
        return report_start_error(error)
    except LostRankError as error:
        logs.report_end(str(error))
        return RANK_LOST
    if phase is RunPhase.COMPLETE:
        return 0
    return 1 if phase is RunPhase.FAILED else drained_status


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vcpo_learner",
        description="Lease prompts to rollout workers, train on their trajectories and publish the "
        "policy. With VCPO_WORKER_KEY and VCPO_STEERING_KEY set, every caller must show the key of "
        "its role. Under torchrun every process is one rank of the learner; rank 0 leads.",
    )
    parser.add_argument("run_file", type=Path, help="YAML file with the VCPORun")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="directory for records and model"
    )
    add_service_options(parser, port=7600, drain="that a draining run waits for work in flight")
    parser.add_argument(
        "--weights-listen",
        metavar="HOST:PORT",
        help="where a process of its own sends weights over HTTP; a further rank of one machine"
        " adds its number there to the port (default: the host of --listen, any free port)",
    )
    parser.add_argument(
        "--weights-host",
        metavar="HOST",
        default="",
        help="host at which workers reach that process (default: the learner's)",
    )
    add_tls_options(parser)
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    parser.add_argument(
        "--linger-seconds",
        dest="linger_s",
        type=float,
        default=3.0,
        help="seconds to serve after the end, so that workers see it (default: %(default)s)",
    )
    parser.add_argument(
        "--drained-status",
        type=int,
        default=0,
        help="exit status of a drained run (default: %(default)s)",
    )
    return parser.parse_args()
