"""The command line of a rollout worker, `python -m vcpo_rollout`, and its exit status."""

import argparse
import asyncio
import os
import socket
from pathlib import Path

import grpc

from vcpo.service import logs
from vcpo.service.lifecycle import (
    SET_ASIDE,
    StartError,
    add_service_options,
    check_driver,
    report_start_error,
    start_errors,
    wake_at_parent_exit,
)
from vcpo.wire.access.tls import add_tls_options
from vcpo.wire.errors import SetAsideError
from vcpo_rollout.app import Options, run_worker
from vcpo_rollout.engines.engine import EngineError
from vcpo_rollout.generation.environment_pool import HungCallsError
from vcpo_rollout.transport.learner_client import LearnerFailedError


def main() -> int:
    """Parse the command line and work; return the exit status.

    0 at the run's end or after a shutdown, 1 if engine, environment or learner failed, 2 if the
    user must correct something, 77 if the learner has set the worker aside.
    """
    wake_at_parent_exit()
    options = _options()
    try:
        with start_errors():
            logs.configure("rollout")
        check_driver()
        logs.identify_process(group=options.group, worker=options.worker_id)
        asyncio.run(run_worker(options))
    except StartError as error:
        return report_start_error(error)
    except (EngineError, HungCallsError, LearnerFailedError) as error:
        parts = {EngineError: "engine", HungCallsError: "environment"}
        part = next((parts[kind] for kind in parts if isinstance(error, kind)), "learner")
        logs.report_end(f"{part}: {error}")
        return 1
    except SetAsideError as error:
        logs.report_end(f"set aside by the learner: {error.cause}: {error}")
        return SET_ASIDE
    except grpc.aio.AioRpcError as error:
        logs.report_end(f"learner: refused with {error.code().name}: {error.details()}")
        return 1
    return 0


def _options() -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m vcpo_rollout",
        description="Leases prompts from the learner, samples responses with the newest policy, "
        "judges them and submits them. Shows the learner the key in VCPO_WORKER_KEY, if it is set.",
    )
    parser.add_argument("run_file", type=Path, help="file with the run, a VCPORun in YAML")
    parser.add_argument("--learner", required=True, help="host:port of the learner's gRPC server")
    parser.add_argument(
        "--group", required=True, help="name of the worker's rollout group in spec.rollouts"
    )
    parser.add_argument(
        "--worker-id",
        default=f"{socket.gethostname()}-{os.getpid()}",
        help="id, unique in the run (default: host name and process id)",
    )
    finish = "in which running responses may finish at a shutdown; others get what is left"
    add_service_options(parser, port=7610, drain=finish)
    add_tls_options(parser)
    return Options(**vars(parser.parse_args()))
