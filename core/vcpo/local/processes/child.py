"""The host's own processes: started, watched, stopped; never anybody else's.

Every child holds the reading end of a pipe as its standard input. When the host is gone, however it
went, the pipe ends and the child leaves (`vcpo.service.lifecycle.on_parent_exit`): no orphan stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vcpo.service.crash import crash_cause, describe_exit
from vcpo.service.lifecycle import START_ERROR_MARK, Ready, read_ready

_POLL_S = 0.05
_MAX_LOG_BYTES = 65_536
_KILL_GRACE_S = 15.0
"""A killed process is gone as soon as the kernel has taken back what it held, device memory too."""


@dataclass(slots=True, kw_only=True)
class ChildProcess:
    """One process of this host."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    """Processes of one name append to one log."""
    log_start_bytes: int
    """Where in it this process began."""
    ready_file: Path
    hung_s: float = 0.0
    """How long it had not answered when it was killed for that; 0 when it was not."""

    @property
    def exit_code(self) -> int | None:
        """How it ended; negative is a signal's number; None while it runs."""
        return self.process.poll()

    @property
    def ready(self) -> Ready | None:
        """Where it serves; None while it does not yet."""
        return read_ready(self.ready_file)

    def terminate(self) -> None:
        """Send SIGTERM, unless it is gone already; one that was stopped goes on, so as to leave."""
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def kill_hung(self, silent_s: float) -> None:
        """Kill it because it has not answered for so long."""
        self.hung_s = silent_s
        self.kill()

    def close_stdin(self) -> None:
        """Close its standard input; one that still runs takes that for the host's end."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def log_tail(self) -> str:
        """The last of what it wrote."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(self.log_start_bytes, self.log.stat().st_size - _MAX_LOG_BYTES))
            return log.read().decode(errors="replace")
        return ""

    def failure(self) -> str:
        """How it ended and why, in a sentence: what the user must put right, or a crash's cause."""
        assert self.exit_code is not None  # asked of those that have ended
        if self.hung_s:
            return f"had not answered for {self.hung_s:.0f} s and was killed (log: {self.log})"
        said = self.log_tail()
        _, mark, complaint = said.rpartition(START_ERROR_MARK)
        if mark:
            return f"{'cannot start' if self.ready is None else 'gave up'}: {complaint.strip()}"
        cause = crash_cause(said) if self.exit_code != -signal.SIGKILL else ""
        return f"{describe_exit(self.exit_code)}{cause and ': '}{cause} (log: {self.log})"

    def _send(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)


def start_child(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    ready_file: Path,
    environment: Mapping[str, str],
) -> ChildProcess:
    """Start a process of this host, in its own session so that Ctrl-C reaches only the host."""
    ready_file.unlink(missing_ok=True)
    with log.open("ab") as output:
        log_start_bytes = output.tell()
        process = subprocess.Popen(  # noqa: S603 - our own modules, by our own interpreter
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    return ChildProcess(
        name=name,
        process=process,
        log=log,
        log_start_bytes=log_start_bytes,
        ready_file=ready_file,
    )


async def wait_for_exit(children: Iterable[ChildProcess], timeout_s: float) -> list[ChildProcess]:
    """Wait until all have ended, at most `timeout_s` seconds; returns those that have not."""
    deadline_s = time.monotonic() + timeout_s
    left = [child for child in children if child.exit_code is None]
    while left and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)
        left = [child for child in left if child.exit_code is None]
    return left


async def stop_all(children: Iterable[ChildProcess], grace_s: float) -> None:
    """Ask all to leave; kill those that have not after `grace_s` seconds; none is left."""
    everyone = list(children)
    for child in everyone:
        child.terminate()
    for child in await wait_for_exit(everyone, grace_s):
        child.kill()
    await wait_for_exit(everyone, _KILL_GRACE_S)
    for child in everyone:
        child.close_stdin()
