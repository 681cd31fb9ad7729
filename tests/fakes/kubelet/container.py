"""One container: started, probed, restarted, stopped.

waiting --start--> running --exit--> terminated            (restartPolicy forbids another)
   ^                  |
   '---- back-off ----'  exit or failed probe, restartPolicy allows
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tests.fakes.kubelet import process as kubelet_process
from tests.fakes.kubelet.environment import JsonObject
from tests.fakes.kubelet.probes import verdicts
from tests.fakes.kubelet.settings import KubeletSettings
from tests.fakes.kubelet.status import (
    BACK_OFF_RESTARTING,
    ContainerState,
    restart_delay_s,
    termination,
)


def timestamp() -> str:
    """The time as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that starting a container takes."""

    command: list[str]
    environment: dict[str, str]
    directory: Path
    """Working directory."""
    logs: Path
    """Directory of the output: one file for each start."""
    pod_ip: str
    restart_policy: str
    grace_s: float
    """Time between SIGTERM and SIGKILL when a probe has failed."""


class Container:
    """Keeps one container of a pod running. Owner of its process and its state: its own task."""

    def __init__(
        self, spec: JsonObject, settings: KubeletSettings, changed: Callable[[], None]
    ) -> None:
        self.state = ContainerState(name=spec["name"], image=spec["image"])
        self._spec = spec
        self._settings = settings
        self._period_s = settings.longest_probe_period_s
        self._changed = changed
        self._process: kubelet_process.Process | None = None
        self._stopping = False

    def wait_for(self, reason: str, message: str) -> None:
        self._become(waiting=(reason, message))

    async def run(self, launch: Launch) -> None:
        """Run until the pod's restart policy is content, or until stopped."""
        while not self._stopping:
            ended = await self._run_once(launch)
            if self._stopping or not _again(launch.restart_policy, ended["exitCode"]):
                self._become(terminated=ended, running_since=None, waiting=None)
                return
            await self._back_off(ended)

    async def stop(self, grace_s: float) -> None:
        """End the process, and start none again."""
        self._stopping = True
        self._become(ready=False)
        if self._process is not None:
            await self._process.stop(grace_s)

    async def _run_once(self, launch: Launch) -> JsonObject:
        started_at = timestamp()
        self._process = process = await kubelet_process.start(
            launch.command,
            environment=launch.environment,
            directory=launch.directory,
            log=launch.logs / f"{self._spec['name']}.{self.state.restarts}.log",
        )
        self._become(running_since=started_at, waiting=None)
        probing = asyncio.create_task(self._probe(launch, process))
        try:
            exit_code = await process.wait()
        except asyncio.CancelledError:
            await process.end_at_once()
            raise
        finally:
            probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probing
            self._process = None
        self._become(started=False, ready=False)
        return termination(
            exit_code,
            killed_by_us=process.stopped_by_us,
            started_at=started_at,
            finished_at=timestamp(),
            tail=process.tail(),
        )

    async def _back_off(self, ended: JsonObject) -> None:
        delay_s = restart_delay_s(
            self.state.restarts,
            first_s=self._settings.first_back_off_s,
            last_s=self._settings.last_back_off_s,
        )
        message = f"back-off {delay_s:g}s restarting failed container={self._spec['name']}"
        self._become(
            running_since=None,
            waiting=(BACK_OFF_RESTARTING, message),
            last_terminated=ended,
            restarts=self.state.restarts + 1,
        )
        await asyncio.sleep(delay_s)

    async def _probe(self, launch: Launch, process: kubelet_process.Process) -> None:
        """Start-up first; readiness and liveness only once that has passed."""
        if "startupProbe" in self._spec and not await self._has_begun(launch.pod_ip):
            await process.stop(launch.grace_s)
            return
        self._become(started=True, ready="readinessProbe" not in self._spec)
        async with asyncio.TaskGroup() as tasks:
            if "readinessProbe" in self._spec:
                tasks.create_task(self._follow_readiness(launch.pod_ip))
            if "livenessProbe" in self._spec:
                await self._wait_for_failure(launch.pod_ip)
                await process.stop(launch.grace_s)

    async def _has_begun(self, pod_ip: str) -> bool:
        asking = verdicts(self._spec["startupProbe"], pod_ip, self._period_s)
        async with contextlib.aclosing(asking) as found:
            return await anext(found)

    async def _follow_readiness(self, pod_ip: str) -> None:
        async for verdict in verdicts(self._spec["readinessProbe"], pod_ip, self._period_s):
            self._become(ready=verdict)

    async def _wait_for_failure(self, pod_ip: str) -> None:
        async for verdict in verdicts(self._spec["livenessProbe"], pod_ip, self._period_s):
            if not verdict:
                return

    def _become(self, **changes: object) -> None:
        state = replace(self.state, **changes)  # type: ignore[arg-type]  # fields by their names
        if state != self.state:
            self.state = state
            self._changed()


def _again(restart_policy: str, exit_code: int) -> bool:
    return restart_policy == "Always" or (restart_policy == "OnFailure" and exit_code != 0)
