"""`python -m vcpo_learner`: train one run."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from vcpo.service.lifecycle import StartError, report_start_error
from vcpo.wire.phase import RunPhase
from vcpo_learner.app import Options, run_learner


def main() -> int:
    """Parse the command line and train.

    Returns 0 for a complete run, 1 for a failed one, 2 when the user must put something right, and
    what the command line says for a run that was drained.
    """
    arguments = _arguments()
    # In a file a bar is one long line, and hides what was said last.
    disable_progress_bar()  # type: ignore[no-untyped-call] # the library does not type it
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        phase = asyncio.run(run_learner(_options(arguments)))
    except StartError as error:
        return report_start_error(error)
    if phase is RunPhase.COMPLETE:
        return 0
    return 1 if phase is RunPhase.FAILED else int(arguments.drained_status)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vcpo_learner",
        description="Leases prompts to rollout workers, trains on what they submit, publishes the "
        "policy. Asks for the token in VCPO_TOKEN on every call when that is set.",
    )
    parser.add_argument("run_file", type=Path, help="the run, a VCPORun in YAML")
    parser.add_argument("--run-dir", type=Path, required=True, help="where records and model go")
    parser.add_argument("--listen", default="127.0.0.1:7600", help="gRPC host:port; port 0: any")
    parser.add_argument("--metrics-listen", default="127.0.0.1:7601", help="/metrics host:port")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument(
        "--drain-seconds", type=float, default=10.0, help="wait for work in flight when draining"
    )
    parser.add_argument(
        "--linger-seconds", type=float, default=3.0, help="go on answering after the end"
    )
    parser.add_argument("--ready-file", type=Path, help="written once the learner serves")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="drain when standard input ends"
    )
    parser.add_argument(
        "--drained-status", type=int, default=0, help="exit status when asked to leave too early"
    )
    return parser.parse_args()


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        run_file=arguments.run_file,
        run_dir=arguments.run_dir,
        listen=arguments.listen,
        metrics_listen=arguments.metrics_listen,
        resume=arguments.resume,
        drain_s=arguments.drain_seconds,
        linger_s=arguments.linger_seconds,
        ready_file=arguments.ready_file,
        exit_with_parent=arguments.exit_with_parent,
    )


if __name__ == "__main__":
    raise SystemExit(main())
