"""Processes of the fake kubelet: each has a session of its own and is terminated or killed."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_BYTES = 4096


@dataclass(slots=True, kw_only=True)
class Process:
    """One process of a container, with all that it starts itself. Owner: its container."""

    child: asyncio.subprocess.Process
    log: Path
    stopped_by_us: bool = field(default=False, init=False)

    @property
    def pid(self) -> int:
        return self.child.pid

    async def wait(self) -> int:
        """Wait for the end; a negative code is a signal's number. Nothing of its group is left."""
        code = await self.child.wait()
        self._send_to_group(signal.SIGKILL)
        return code

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL to the whole group once the grace period is over."""
        self.stopped_by_us = True
        if self.child.returncode is None:
            self.child.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self.child.wait()
        except TimeoutError:
            await self.end_at_once()

    async def end_at_once(self) -> None:
        self.kill()
        await self.child.wait()

    def kill(self) -> None:
        self.stopped_by_us = True
        self._send_to_group(signal.SIGKILL)

    def tail(self) -> str:
        """The end of the output."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip()

    def _send_to_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)


async def start(
    command: Sequence[str], *, environment: Mapping[str, str], directory: Path, log: Path
) -> Process:
    """Start a command behind the guard; its output goes to `log`, its input is empty."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-ISs", str(_GUARD), str(os.getpid()), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environment),
            cwd=directory,
            start_new_session=True,
        )
    return Process(child=child, log=log)
