"""The local host: what the operator is in a cluster, with processes instead of pods.

Each turn: look after the processes, ask the learner for its signals, let `vcpo.control` decide,
apply the decision, show the run. When the learner cannot be asked everything stays as it is.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import grpc

from vcpo.control.conditions import ConditionType
from vcpo.control.decision import Decision, decide
from vcpo.control.limits import Limits
from vcpo.control.signals import RunSignals
from vcpo.control.state import ControlState
from vcpo.journal import EventRecord, Journal
from vcpo.lifecycle import CANNOT_START
from vcpo.local.fleet import Fleet, FleetError
from vcpo.local.processes import Child
from vcpo.local.run_dir import RunDir
from vcpo.local.view import LiveView
from vcpo.local.watch import run_view
from vcpo.metrics import HostMetrics, serve_metrics
from vcpo.spec import VCPORun
from vcpo.steering import LearnerControl, run_signals
from vcpo.wire.client import open_channel
from vcpo.wire.phase import RunPhase, phase_from_message
from vcpo.wire.v1 import control_pb2

_STARTING_POLL_S = 0.1
_DRAIN_TIMEOUT_S = 60.0
_LEAVE_GRACE_S = 15.0
_LOCAL = ""
"""A local run's namespace in the metrics."""


class Ending(IntEnum):
    """How a local run ended; the exit status of `vcpo run`."""

    COMPLETE = 0
    FAILED = 1
    INTERRUPTED = 130


class _InterruptedError(Exception):
    """The user wants the run to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How to run, besides the run's own spec."""

    resume: bool
    metrics_port: int
    """Port of the host's own /metrics on the loopback address; 0 takes a free one."""


class Host:
    """Runs one VCPORun on this machine, from its first process to its last."""

    def __init__(self, run: VCPORun, run_dir: RunDir, view: LiveView, options: HostOptions) -> None:
        self._run = run
        self._spec = run.spec
        self._view = view
        self._options = options
        self._fleet = Fleet(run, run_dir)
        self._journal = Journal(run_dir.path)
        self._metrics = HostMetrics()
        self._limits = Limits.of(run.spec)
        self._state = ControlState.start(self._limits, now_s=time.monotonic())
        self._channel: grpc.aio.Channel | None = None
        self._learner_port = 0
        self._learner_restarts = 0
        self._started_s = time.monotonic()
        self._latest: control_pb2.Signals | None = None
        self._latest_s = self._started_s
        self._interrupted = asyncio.Event()

    async def run(self) -> Ending:
        """Run to the end; no process of the run is left when this returns."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            with serve_metrics(self._metrics.registry, "127.0.0.1", self._options.metrics_port):
                return await self._run_to_the_end()
        finally:
            await self._fleet.stop(_LEAVE_GRACE_S)
            if self._channel is not None:
                await self._channel.close()

    async def _run_to_the_end(self) -> Ending:
        try:
            await self._start_learner(resume=self._options.resume)
            self._scale(self._state.fleet.replicas)
            while not await self._turn():
                await self._pause(self._spec.control.poll_seconds)
        except _InterruptedError:
            await self._drain()
            return Ending.INTERRUPTED
        except FleetError as error:
            self._event("Failed", str(error))
            return Ending.FAILED
        self._event("Complete", f"{self._spec.steps} steps")
        return Ending.COMPLETE

    async def _turn(self) -> bool:
        """Look after everything once; True when the run is complete."""
        for worker in self._fleet.reap():
            await self._mourn(worker)
        if await self._learner_ended():
            return True
        signals = await self._ask()
        decision, self._state = decide(self._limits, self._state, signals, time.monotonic())
        await self._apply(decision)
        self._check_deadlines()
        self._show(decision)
        return False

    async def _start_learner(self, *, resume: bool) -> None:
        learner = self._fleet.start_learner(resume=resume, port=self._learner_port)
        while (ready := learner.ready) is None:
            self._show(None)
            if learner.exit_code is not None:
                raise FleetError(f"the learner did not start:\n{learner.complaint()}")
            await self._pause(_STARTING_POLL_S)
        self._learner_port = ready.grpc_port
        if self._channel is None:
            address = f"127.0.0.1:{ready.grpc_port}"
            self._channel = open_channel(address, token=self._fleet.token)
        self._event("LearnerStarted", f"process {ready.pid}, metrics on port {ready.metrics_port}")

    async def _learner_ended(self) -> bool:
        learner = self._fleet.learner
        if learner is None or learner.exit_code is None:
            return False
        if learner.exit_code == 0:
            return True
        allowed = self._spec.failure_policy.max_learner_restarts
        if learner.exit_code == CANNOT_START or self._learner_restarts >= allowed:
            raise FleetError(f"the learner ended ({learner.exit_code}):\n{learner.complaint()}")
        self._learner_restarts += 1
        count = f"restart {self._learner_restarts} of {allowed}"
        self._event("LearnerRestarted", f"it ended with {learner.exit_code}; {count}")
        await self._start_learner(resume=True)
        return False

    async def _mourn(self, worker: Child) -> None:
        """Hand back for a worker that died, so that its prompts need not wait for their leases."""
        code = worker.exit_code
        try:
            released = await self._control().release_all_of(worker.name)
        except grpc.aio.AioRpcError:
            released = 0
        self._event("WorkerLost", f"{worker.name} ended with {code}; {released} leases handed back")

    async def _ask(self) -> RunSignals | None:
        try:
            self._latest = await self._control().signals()
            self._latest_s = time.monotonic()
            return run_signals(self._latest, age_s=0.0)
        except (grpc.aio.AioRpcError, ValueError):
            # Nothing new: what is in force stays in force until the signals are too old.
            if self._latest is None:
                return None
            return run_signals(self._latest, age_s=time.monotonic() - self._latest_s)

    def _phase(self) -> RunPhase:
        if self._latest is None:
            return RunPhase.RUNNING
        return phase_from_message(self._latest.phase)

    async def _apply(self, decision: Decision) -> None:
        reason = "; ".join(decision.reasons)
        in_force = self._latest.admission_lag_steps if self._latest is not None else None
        if in_force is not None and in_force != decision.admission_lag_steps:
            try:
                await self._control().throttle(decision.admission_lag_steps, reason)
            except grpc.aio.AioRpcError:
                return  # asked again in the next turn, since the signals will still differ
        for line in decision.reasons:
            self._event("Decision", line)
        if self._phase() is RunPhase.RUNNING:
            self._scale(decision.replicas)
        self._export(decision)

    def _scale(self, replicas: Mapping[str, int]) -> None:
        busy = {}
        if self._latest is not None:
            busy = {each.worker_id: each.in_flight_trajectories for each in self._latest.workers}
        self._fleet.scale(replicas, self._learner_port, busy)

    def _check_deadlines(self) -> None:
        """Fail a run that takes too long; being stuck must never be silent."""
        elapsed_s = time.monotonic() - self._started_s
        limit_s = self._spec.active_deadline_seconds
        if limit_s is not None and elapsed_s > limit_s:
            raise FleetError(f"spec.activeDeadlineSeconds: the run took longer than {limit_s} s")
        limit_s = self._spec.startup_deadline_seconds
        if elapsed_s > limit_s and (self._latest is None or self._latest.step == 0):
            raise FleetError(
                f"spec.startupDeadlineSeconds: no step within {limit_s} s; see the logs of the"
                " processes, or raise it"
            )

    async def _drain(self) -> None:
        """End in good order: no new work, a checkpoint, everybody leaves; a second Ctrl-C kills."""
        self._event("Draining", "saving a checkpoint; press Ctrl-C again to stop at once")
        draining = asyncio.create_task(self._drain_in_good_order())
        second = asyncio.create_task(self._interrupted.wait())
        await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            self._event("Killed", "asked to stop at once")
            self._fleet.kill()
        for task in (draining, second):
            task.cancel()
        await asyncio.gather(draining, second, return_exceptions=True)

    async def _drain_in_good_order(self) -> None:
        if self._channel is None:
            return
        try:
            await self._control().drain("interrupted by the user")
        except grpc.aio.AioRpcError as error:
            self._event("DrainFailed", error.details() or "the learner did not answer")
            return
        if not await self._fleet.wait_for_learner(_DRAIN_TIMEOUT_S):
            self._event("DrainTimedOut", f"the learner did not end within {_DRAIN_TIMEOUT_S:g} s")

    def _interrupt(self) -> None:
        self._interrupted.set()

    async def _pause(self, duration_s: float) -> None:
        """Wait, unless the user interrupts.

        Raises:
            _InterruptedError: when the user has.
        """
        try:
            async with asyncio.timeout(duration_s):
                await self._interrupted.wait()
        except TimeoutError:
            return
        self._interrupted.clear()
        raise _InterruptedError

    def _control(self) -> LearnerControl:
        assert self._channel is not None  # the learner has started
        return LearnerControl(self._channel)

    def _event(self, kind: str, message: str) -> None:
        record = EventRecord(time_unix_s=time.time(), source="host", kind=kind, message=message)
        self._journal.event(record)
        self._view.event(f"{kind}: {message}")

    def _export(self, decision: Decision) -> None:
        name = self._run.metadata.name
        for condition in decision.conditions:
            self._metrics.set_condition(_LOCAL, name, condition.type, condition.status)
        for group, wanted in decision.replicas.items():
            ready = sum(child.ready is not None for child in self._fleet.workers[group])
            self._metrics.replicas.labels(_LOCAL, name, group, "desired").set(wanted)
            self._metrics.replicas.labels(_LOCAL, name, group, "ready").set(ready)
        fed = decision.condition(ConditionType.LEARNER_FED)
        self._metrics.decisions.labels(_LOCAL, name, decision.direction, fed.reason).inc()

    def _show(self, decision: Decision | None) -> None:
        desired = decision.replicas if decision is not None else self._state.fleet.replicas
        if self._phase() is not RunPhase.RUNNING:
            desired = {}
        self._view.update(
            run_view(
                self._run,
                self._latest,
                workers_desired=sum(desired.values()),
                elapsed_s=time.monotonic() - self._started_s,
            )
        )
