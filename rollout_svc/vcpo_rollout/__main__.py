"""`python -m vcpo_rollout`: generate for one run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from pathlib import Path

import grpc

from vcpo.service.lifecycle import StartError, report_start_error
from vcpo_rollout.app import Options, run_worker
from vcpo_rollout.engines.engine import EngineError
from vcpo_rollout.transport.retries import LearnerFailedError


def main() -> int:
    """Parse the command line and work; 0 at the run's end or when asked to leave."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(run_worker(_options()))
    except StartError as error:
        return report_start_error(error)
    except EngineError as error:
        sys.stderr.write(f"engine: {error}\n")
        return 1
    except LearnerFailedError as error:
        sys.stderr.write(f"learner: {error}\n")
        return 1
    except grpc.aio.AioRpcError as error:
        sys.stderr.write(f"learner: it refuses with {error.code().name}: {error.details()}\n")
        return 1
    return 0


def _options() -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m vcpo_rollout",
        description="Leases prompts from the learner, samples answers with the newest policy it "
        "holds, judges and submits them. Sends the token in VCPO_TOKEN when that is set.",
    )
    parser.add_argument("run_file", type=Path, help="the run, a VCPORun in YAML")
    parser.add_argument("--learner", required=True, help="the learner's gRPC host:port")
    parser.add_argument("--group", required=True, help="rollout group of the run's spec")
    parser.add_argument(
        "--worker-id",
        default=f"{socket.gethostname()}-{os.getpid()}",
        help="unique in the run (default: host name and process id)",
    )
    parser.add_argument("--listen", default="127.0.0.1:7610", help="gRPC host:port")
    parser.add_argument("--metrics-listen", default="127.0.0.1:7611", help="/metrics host:port")
    parser.add_argument(
        "--drain-seconds", type=float, default=10.0, help="finish answers this long when leaving"
    )
    parser.add_argument("--ready-file", type=Path, help="written once the worker works")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="leave when standard input ends"
    )
    arguments = parser.parse_args()
    return Options(
        run_file=arguments.run_file,
        learner=arguments.learner,
        group=arguments.group,
        worker_id=arguments.worker_id,
        listen=arguments.listen,
        metrics_listen=arguments.metrics_listen,
        drain_s=arguments.drain_seconds,
        ready_file=arguments.ready_file,
        exit_with_parent=arguments.exit_with_parent,
    )


if __name__ == "__main__":
    raise SystemExit(main())
