"""The server of weights as the rank sees it that owns them: a process of its own.

```
rank      set and deltas in shared memory  --descriptors-->  process  --chunks-->  workers
          patches the set in place                           reads what is there
```

The process holds no tensors and imports no library for them. It is started with the rank and ends
with it, however that ends. If it dies, the manifests name no address, so the learner sends weights
itself, and another process is started after a pause. It gets the same files again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vcpo.metrics.label_values import WeightForm
from vcpo.service.crash import describe_exit
from vcpo.wire.access.roles import CallerRole, RoleKeys, key_variables
from vcpo.wire.guard import CallRefusal
from vcpo_learner.weight_server.held_files import HeldFile
from vcpo_learner.weight_server.instructions import Instructions

_LOGGER = logging.getLogger(__name__)
_PATIENCE_S = 10.0
"""Time in which the process has to carry out an instruction; it takes milliseconds."""
_START_S = 60.0
"""Time in which it has to serve; it takes seconds, more on a busy machine."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before another process is started; it doubles until one gets to serve."""
_EXIT_S = 1.0
"""Time in which a process that reports no more has to end."""
_STOP_MARGIN_S = 2.0


@dataclass(slots=True)
class _Started:
    """One start of the process."""

    process: asyncio.subprocess.Process
    instructions: Instructions
    port: int = 0
    """0 until it serves."""
    sent_versions: frozenset[int] = frozenset()
    """Versions whose full set it has."""
    awaited: dict[int, tuple[frozenset[int], asyncio.Future[bool]]] = field(default_factory=dict)
    """Instructions under way: the versions that they name, and whether they are carried out."""
    sent_bytes: Counter[WeightForm] = field(default_factory=Counter)
    refusals: Counter[CallRefusal] = field(default_factory=Counter)


class WeightServer:
    """Sends a rank's files from another process. Owner: an event loop.

    listen: host:port where it serves; port 0 takes a free one, another one at every start.
    host: host at which workers reach this process; empty: that at which they reach the learner.
    tls: folder of the certificates; None serves in plain text.
    keys: the rank's; the process gets that of workers only.
    keeps_port: whether a process that follows one that has died listens on the same port, for
        manifests that name it.
    """

    def __init__(
        self,
        listen: str,
        *,
        host: str = "",
        tls: Path | None = None,
        plain_text: bool = False,
        keys: RoleKeys | None = None,
        keeps_port: bool = False,
    ) -> None:
        self._listen = listen
        self._keeps_port = keeps_port
        encryption = [] if tls is None else [f"--tls={tls}"]
        self._command = [
            *(sys.executable, "-m", "vcpo_learner.weight_server"),
            *encryption,
            *(["--plain-text"] if plain_text else []),
        ]
        self._host = host
        worker_key = (keys or {}).get(CallerRole.WORKER, "")
        self._variables = key_variables({CallerRole.WORKER: worker_key}, [CallerRole.WORKER])
        self._held: tuple[HeldFile, ...] = ()
        self._current: _Started | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._is_closing = False
        self._sent_bytes: Counter[WeightForm] = Counter()
        self._refusals: Counter[CallRefusal] = Counter()
        self.num_starts = 0
        """Processes started so far."""

    @property
    def process_id(self) -> int | None:
        """Id of the process; None while there is none."""
        return None if self._current is None else self._current.process.pid

    @property
    def sent_bytes(self) -> Counter[WeightForm]:
        """Bytes sent by all processes so far, by form."""
        return self._sent_bytes + (self._current.sent_bytes if self._current else Counter())

    @property
    def refusals(self) -> Counter[CallRefusal]:
        """Calls that all processes have refused so far, by reason."""
        return self._refusals + (self._current.refusals if self._current else Counter())

    def address_of(self, policy_version: int) -> str:
        """Return where the version is fetched: `host:port`, or `:port` without a host of its own.

        It is empty while no process can send the version.
        """
        current = self._current
        if current is None or policy_version not in current.sent_versions:
            return ""
        return f"{self._host}:{current.port}"

    def start(self) -> None:
        """Start the process, and another one whenever it ends, until `close`."""
        self._supervising = asyncio.create_task(self._supervise())

    def tell(self, held: Sequence[HeldFile]) -> asyncio.Future[bool]:
        """Have these files sent and no others; return whether the process does so.

        A process that is not up yet gets them when it is.
        """
        self._held = tuple(held)
        current = self._current
        if current is not None and current.port:
            return self._tell(current)
        refused = asyncio.get_running_loop().create_future()
        refused.set_result(False)
        return refused

    async def hold(self, held: Sequence[HeldFile]) -> bool:
        """Tell the process to send these files and no others; return whether it does so by then."""
        told = self.tell(held)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                return await asyncio.shield(told)
        _LOGGER.error("the server of weights did not react for %g s and is killed", _PATIENCE_S)
        self._kill()
        return False

    async def close(self, grace_s: float) -> None:
        """End the process when its running fetches have ended, or after `grace_s` seconds."""
        self._is_closing = True
        if self._supervising is None:
            return
        if self._current is not None:
            with contextlib.suppress(OSError):
                self._current.instructions.stop(grace_s)
            await asyncio.wait([self._supervising], timeout=grace_s + _STOP_MARGIN_S)
        self._supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervising

    async def _supervise(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_closing:
            try:
                ended = await self._run()
            except OSError as error:
                _LOGGER.warning("the server of weights cannot be started: %s", error)
            else:
                if self._is_closing:
                    return
                if ended.port:
                    pause_s = _FIRST_PAUSE_S
                assert ended.process.returncode is not None
                how = describe_exit(ended.process.returncode)
                _LOGGER.error("the server of weights %s; another one starts in %g s", how, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _run(self) -> _Started:
        """Run one process to its end."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    f"--listen={self._listen}",
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.PIPE,
                    env={**os.environ, **self._variables},
                )
            self.num_starts += 1
            current = _Started(process, Instructions(ours))
            self._current = current
            assert process.stdout is not None
            limit = asyncio.get_running_loop().call_later(
                _START_S, self._end_late, current, _START_S
            )
            try:
                async for line in process.stdout:
                    self._take(current, json.loads(line))
            finally:
                limit.cancel()
                self._forget(current)
                # A process that has ended must not be killed: that would take its exit status from
                # the event loop, which then knows no reason.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_EXIT_S):
                        await process.wait()
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                await process.wait()
        return current

    def _take(self, current: _Started, report: dict[str, Any]) -> None:
        """Take a report of the process."""
        if "port" in report:
            current.port = report["port"]
            if self._keeps_port:
                self._listen = f"{self._listen.rpartition(':')[0]}:{current.port}"
            where = current.process.pid, current.port
            _LOGGER.info("process %d sends weights on port %d", *where)
            self._tell(current)
        elif "number" in report:
            current.sent_versions, told = current.awaited.pop(report["number"])
            if not told.done():
                told.set_result(True)
        else:
            current.sent_bytes = Counter(
                {WeightForm(form): total for form, total in report["sent_bytes"].items()}
            )
            current.refusals = Counter(
                {CallRefusal(reason): total for reason, total in report["refusals"].items()}
            )

    def _tell(self, current: _Started) -> asyncio.Future[bool]:
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            number = current.instructions.hold(self._held)
        except OSError as error:
            _LOGGER.warning("the server of weights takes no instructions: %s", error)
            self._kill()
            told.set_result(False)
        else:
            whole = (each for each in self._held if each.base_policy_version is None)
            current.awaited[number] = frozenset(each.policy_version for each in whole), told
        return told

    def _forget(self, current: _Started) -> None:
        """Count what an ended process has sent, and tell whoever waits for it."""
        self._current = None
        self._sent_bytes += current.sent_bytes
        self._refusals += current.refusals
        for _, told in current.awaited.values():
            if not told.done():
                told.set_result(False)

    def _end_late(self, current: _Started, limit_s: float) -> None:
        """End a process that does not serve yet: nothing is asked of it that it could not do."""
        if not current.port and current is self._current:
            _LOGGER.error("the server of weights did not serve within %g s and is killed", limit_s)
            self._kill()

    def _kill(self) -> None:
        if self._current is not None:
            with contextlib.suppress(ProcessLookupError):
                self._current.process.kill()
