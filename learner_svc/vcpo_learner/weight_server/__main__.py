"""`python -m vcpo_learner.weight_server`: send the weights of the process that started this one.

Standard input is a socket with instructions (`instructions`); standard output is a line of JSON for
each report:

```
{"port": 7620}                                                 it serves
{"number": 3}                                                  instruction 3 is carried out
{"sent_bytes": {"full": 9000}, "refusals": {"key": 1}}         since its start
```

The process ends when its standard input does, so it never outlives its parent. Stop signals are for
the parent, which still needs this process while it drains.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

from vcpo.service import logs
from vcpo.service.lifecycle import (
    StartError,
    report_start_error,
    start_errors,
    wake_at_parent_exit,
)
from vcpo.wire.access.roles import CallerRole, keys_from_environment
from vcpo.wire.access.tls import checked_folder
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo_learner.weight_server.held_files import FetchService
from vcpo_learner.weight_server.instructions import read_instructions

_SERVICE = policy_pb2.DESCRIPTOR.services_by_name["PolicyService"].full_name
_REPORT_S = 0.5


def main() -> int:
    """Serve until the parent says stop or ends; return the exit status."""
    wake_at_parent_exit()
    parser = argparse.ArgumentParser(prog="python -m vcpo_learner.weight_server")
    parser.add_argument("--listen", required=True, help="host:port; port 0: any free one")
    parser.add_argument("--tls", type=Path, help="folder of the certificates")
    parser.add_argument("--plain-text", action="store_true", help="as the learner's option")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    reports = _Reports()
    logging.basicConfig(handlers=[logs.line_handler()], level=logging.INFO)
    try:
        asyncio.run(_serve(options, reports))
    except StartError as error:
        return report_start_error(error)
    return 0


class _Reports:
    """Writes reports to what was standard output; what is printed later goes to the log."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        os.dup2(2, 1)

    def send(self, **report: Any) -> None:
        """Write a report; a parent that is gone ends this process by another way."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, json.dumps(report).encode() + b"\n")


async def _serve(options: argparse.Namespace, reports: _Reports) -> None:
    service = FetchService()
    with start_errors():
        server = WireServer(keys=keys_from_environment([CallerRole.WORKER]) or None)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(service, server.grpc_server)
        certificates = checked_folder(
            {"--listen": options.listen}, options.tls, plain_text=options.plain_text
        )
        port = await server.start(options.listen, (_SERVICE,), certificates=certificates)
    reports.send(port=port)
    reporting = asyncio.create_task(_report(service, server, reports))
    grace_s = 0.0
    with socket.socket(fileno=0) as connection:
        async for instruction in read_instructions(connection):
            if instruction.stop_s is not None:
                grace_s = instruction.stop_s
                break
            service.hold(instruction.held)
            reports.send(number=instruction.number)
    await server.stop(grace_s)
    reporting.cancel()
    _send_counts(service, server, reports)


async def _report(service: FetchService, server: WireServer, reports: _Reports) -> None:
    while True:
        await asyncio.sleep(_REPORT_S)
        _send_counts(service, server, reports)


def _send_counts(service: FetchService, server: WireServer, reports: _Reports) -> None:
    reports.send(sent_bytes=service.sent_bytes, refusals=server.guard.refusals)


if __name__ == "__main__":
    raise SystemExit(main())
