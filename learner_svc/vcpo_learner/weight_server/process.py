"""The server of weights as the rank sees it whose files it sends: a process of its own.

```
rank      writes files of versions --> folder <-- reads --  process  --HTTP-->  workers
```

The process holds no tensors and imports no library for them. It is started with the rank and ends
with it, however that ends. If it dies or hangs, another one is started after a pause, and listens
on the same port: manifests name it. Workers ask again until then, and go on with their version.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vcpo.metrics.label_values import WeightForm
from vcpo.service.lifecycle import describe_exit
from vcpo.service.logs import END_VARIABLE
from vcpo.service.process import module_command
from vcpo.wire.access.roles import CallerRole, RoleKeys, key_variables

_LOGGER = logging.getLogger(__name__)
_PATIENCE_S = 10.0
"""Time in which the process has to report; it does so twice a second."""
_START_S = 60.0
"""Time in which it has to serve; it takes a second, more on a busy machine."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before another process is started; it doubles until one gets to serve."""
_STOP_MARGIN_S = 2.0


class WeightServer:
    """Sends the files of a rank from another process. Owner: an event loop.

    root: folder below which the files are, as `vcpo.wire.weights.FILE_PATH` says.
    removed: folder that the process removes at its end; None: nothing.
    listen: host:port where it serves; port 0 takes a free one, the same at every later start.
    host: host at which workers reach this process; empty: that at which they reach the learner.
    tls: folder of the certificates; None serves in plain text.
    keys: the rank's; the process gets that of workers only.
    """

    def __init__(
        self,
        root: Path,
        listen: str,
        *,
        removed: Path | None = None,
        host: str = "",
        tls: Path | None = None,
        plain_text: bool = False,
        keys: RoleKeys | None = None,
    ) -> None:
        self._listen = listen
        self._command = [
            *module_command("vcpo_learner.weight_server", str(root)),
            *([] if tls is None else [f"--tls={tls}"]),
            *(["--plain-text"] if plain_text else []),
            *([] if removed is None else [f"--remove={removed}"]),
        ]
        self._host = host
        worker_key = (keys or {}).get(CallerRole.WORKER, "")
        self._variables = key_variables({CallerRole.WORKER: worker_key}, [CallerRole.WORKER])
        self._process: asyncio.subprocess.Process | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._is_closing = False
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.is_serving = False
        self._ended = Counter[WeightForm]()
        """Bytes that the processes have sent that have ended."""
        self._current = Counter[WeightForm]()
        self.num_starts = 0

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def sent_bytes(self) -> Counter[WeightForm]:
        return self._ended + self._current

    async def address(self) -> str:
        """Return where files are read, `host:port` or `:port`, once a process has served.

        Raises:
            TimeoutError: if none has within a minute; the log says why.
        """
        try:
            async with asyncio.timeout(_START_S):
                return f"{self._host}:{await asyncio.shield(self._port)}"
        except TimeoutError as error:
            raise TimeoutError(
                f"--weights-listen={self._listen}: the process that sends weights does not serve;"
                " its messages are in the log above"
            ) from error

    def start(self) -> None:
        self._supervising = asyncio.create_task(self._supervise())

    async def close(self, grace_s: float) -> None:
        """End the process when its transfers have ended, or after `grace_s` seconds."""
        self._is_closing = True
        if self._supervising is None:
            return
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(f"{grace_s}\n".encode())
            await asyncio.wait([self._supervising], timeout=grace_s + _STOP_MARGIN_S)
        self._supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervising

    async def _supervise(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_closing:
            try:
                status, has_served = await self._run()
            except OSError as error:
                _LOGGER.warning("the server of weights cannot be started: %s", error)
            else:
                if self._is_closing:
                    return
                if has_served:
                    pause_s = _FIRST_PAUSE_S
                how = describe_exit(status)
                _LOGGER.error("the server of weights %s; another one starts in %g s", how, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _run(self) -> tuple[int, bool]:
        """Run one process to its end; return its exit status, and whether it has served."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            f"--listen={self._listen}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **self._variables, END_VARIABLE: ""},
        )
        self.num_starts += 1
        self._process = process
        has_served = False
        assert process.stdout is not None
        try:
            while True:
                limit_s = _PATIENCE_S if self.is_serving else _START_S
                async with asyncio.timeout(limit_s):
                    line = await process.stdout.readline()
                if not line:
                    break
                self._take(process.pid, json.loads(line))
                has_served = self.is_serving
        except TimeoutError:
            _LOGGER.error(  # noqa: TRY400 - the place says nothing
                "the server of weights did not react for %g s and is killed", limit_s
            )
        finally:
            self.is_serving = False
            self._ended, self._current = self.sent_bytes, Counter()
            await _end(process)
            self._process = None
        assert process.returncode is not None
        return process.returncode, has_served

    def _take(self, process_id: int, report: Mapping[str, Any]) -> None:
        if "port" in report:
            port: int = report["port"]
            self._listen = f"{self._listen.rpartition(':')[0]}:{port}"
            self.is_serving = True
            _LOGGER.info("process %d sends weights on port %d", process_id, port)
            if not self._port.done():
                self._port.set_result(port)
        else:
            self._current = Counter(
                {WeightForm(form): n for form, n in report["sent_bytes"].items()}
            )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a process unless it ends by itself, as one does whose output has ended."""
    # A process that has ended must not be killed: that would take its exit status from the event
    # loop, which then knows no reason.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_MARGIN_S):
            await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
