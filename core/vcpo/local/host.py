"""The local host: what the operator is in a cluster, with processes instead of pods.

Each turn: look after the processes, ask the learner for its signals, let `vcpo.control` decide,
apply the decision, show the run. No turn waits for a process: one that starts, hangs or is away
holds up no deadline. When the learner cannot be asked everything stays as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from vcpo.control.conditions import ConditionType
from vcpo.control.decision import ControlDecision, decide
from vcpo.control.limits import Limits
from vcpo.control.run_limits import RunLimits, RunTimes, exceeded_deadline
from vcpo.control.state import ControlState
from vcpo.learner_control import SIGNALS_TIMEOUT_S
from vcpo.local.processes.child import ChildProcess
from vcpo.local.processes.fleet import Fleet, LostWorker, RunFailedError
from vcpo.local.processes.gpus import find_gpus
from vcpo.local.processes.learner import LearnerProcess
from vcpo.local.processes.learner_connection import LearnerConnection
from vcpo.local.processes.liveness import Liveness, answers
from vcpo.local.run_dir import RunDir
from vcpo.local.terminal.ending import Ending, RunOutcome, outcome_of_complete
from vcpo.local.terminal.event_feed import EventFeed
from vcpo.local.terminal.view import LiveView
from vcpo.local.terminal.watch import run_view
from vcpo.metrics import HostMetrics, serve_metrics
from vcpo.records.journal import EventRecord, EventTail, Journal, read_metrics
from vcpo.spec import VCPORun
from vcpo.wire.phase import RunPhase

_STARTING_POLL_S = 0.1
_DRAIN_TIMEOUT_S = 60.0
_LEAVE_GRACE_S = 15.0
_LOCAL = ""
"""A local run's namespace in the metrics."""
_SOURCE = "host"


class _InterruptedError(Exception):
    """The user wants the run to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How to run, besides the run's own spec."""

    resume: bool
    metrics_port: int
    """Port of the host's own /metrics on the loopback address; 0 takes a free one."""
    answer_timeout_s: float = SIGNALS_TIMEOUT_S
    """How long a process may take to answer the host."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, for deadlines and pauses."""


class Host:
    """Runs one VCPORun on this machine, from its first process to its last."""

    def __init__(self, run: VCPORun, run_dir: RunDir, view: LiveView, options: HostOptions) -> None:
        clock = options.clock
        self._run = run
        self._spec = run.spec
        self._run_dir = run_dir
        self._view = view
        self._options = options
        self._clock = clock
        self._fleet = Fleet(run, run_dir, gpus=find_gpus(), clock=clock)
        self._learner = LearnerProcess(
            self._fleet,
            resume=options.resume,
            limits=RunLimits.of(run.spec),
            clock=clock,
        )
        self._link = LearnerConnection(
            token=self._fleet.token, answer_timeout_s=options.answer_timeout_s, clock=clock
        )
        self._liveness = Liveness(startup_deadline_s=run.spec.startup_deadline_seconds, clock=clock)
        self._journal = Journal(run_dir.path)
        self._feed = EventFeed(EventTail(run_dir.path), own_source=_SOURCE)
        self._metrics = HostMetrics()
        self._limits = Limits.of(run.spec)
        self._state = ControlState.start(self._limits, now_s=clock())
        self._started_s = clock()
        self._interrupted = asyncio.Event()

    async def run(self) -> RunOutcome:
        """Run to the end; no process of the run is left when this returns."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted.set)
        try:
            with serve_metrics(self._metrics.registry, "127.0.0.1", self._options.metrics_port):
                return await self._run_to_the_end()
        finally:
            await self._fleet.stop(_LEAVE_GRACE_S)
            await self._link.close()

    async def _run_to_the_end(self) -> RunOutcome:
        if said := self._fleet.gpu_plan.sentence:
            self._event("Gpus", said)
        try:
            while not await self._turn():
                poll_s = self._spec.control.poll_seconds
                await self._pause(poll_s if self._learner.serves else _STARTING_POLL_S)
        except _InterruptedError:
            await self._drain()
            return RunOutcome(ending=Ending.INTERRUPTED)
        except RunFailedError as error:
            self._show_news()
            self._event("Failed", str(error))
            return RunOutcome(ending=Ending.FAILED, message=str(error))
        self._show_news()
        outcome = outcome_of_complete(read_metrics(self._run_dir.path).steps)
        self._event("Complete", f"{self._spec.steps} steps. {outcome.message}".rstrip())
        return outcome

    async def _turn(self) -> bool:
        """Look after everything once; True when the run is complete."""
        for lost in self._fleet.reap():
            await self._report_loss(lost)
        if self._look_after_learner():
            return True
        await self._ask_everybody()
        decision, self._state = decide(
            self._limits, self._state, self._link.signals(), self._clock()
        )
        await self._apply(decision)
        self._export(decision)
        self._check_deadlines()
        self._show_news()
        self._show(decision)
        return False

    def _look_after_learner(self) -> bool:
        """Start the learner, or start it again; True when it has ended with the run."""
        ended = self._learner.take_end(step=self._link.furthest_step)
        if ended is not None:
            if ended.is_complete:
                return True
            self._count_failure("learner", ended.child)
            self._event("LearnerRestarted", ended.message)
        self._learner.start_when_due(self._link.port)
        if (ready := self._learner.take_ready()) is not None:
            self._link.open(ready.grpc_port)
            where = f"process {ready.pid}, metrics on port {ready.metrics_port}"
            self._event("LearnerStarted", where)
        return False

    async def _report_loss(self, lost: LostWorker) -> None:
        """Hand back for a worker that died, so that its prompts need not wait for their leases."""
        released = 0
        if (control := self._link.control) is not None and self._link.answers:
            with contextlib.suppress(grpc.aio.AioRpcError):
                released = await control.release_all_leases(lost.child.name)
        message = f"{lost.child.name} {lost.child.failure()}; {released} leases handed back"
        if lost.pause_s:
            message += f"; another one in {lost.pause_s:g} s"
        self._count_failure("rollout", lost.child)
        self._event("WorkerLost", message)

    async def _ask_everybody(self) -> None:
        """Ask the learner for signals, and everybody for a sign of life; kill those that hang.

        A learner that fails to tell its signals lives: they may wait for others, or be at fault.
        """
        children = [child for group in self._fleet.workers.values() for child in group]
        if self._learner.child is not None:
            children.append(self._learner.child)
        timeout_s = self._options.answer_timeout_s
        health = asyncio.gather(*(answers(child, timeout_s) for child in children))
        _, answered = await asyncio.gather(self._link.ask(), health)
        if self._link.answers and self._link.latest is not None:
            delivered = [one for one in self._link.latest.workers if one.accepted_trajectories]
            self._fleet.record_productive(one.worker_id for one in delivered)
        for child, did_answer in zip(children, answered, strict=True):
            self._liveness.note(child, answered=did_answer)
            if self._liveness.is_hung(child):
                child.kill_hung(self._liveness.silent_s(child))
        self._liveness.retain(children)

    async def _apply(self, decision: ControlDecision) -> None:
        latest, control = self._link.latest, self._link.control
        if latest is None or control is None:
            return
        if self._link.answers and latest.admission_lag_steps != decision.admission_lag_steps:
            try:
                await control.throttle(decision.admission_lag_steps, "; ".join(decision.reasons))
            except grpc.aio.AioRpcError:
                return  # asked again in the next turn, since the signals will still differ
        for line in decision.reasons:
            self._event("Decision", line)
        if self._link.phase is RunPhase.RUNNING:
            busy = {each.worker_id: each.in_flight_trajectories for each in latest.workers}
            self._fleet.scale(decision.replicas, self._link.port, busy)

    def _check_deadlines(self) -> None:
        """Fail a run that takes too long.

        Raises:
            RunFailedError: when a deadline of the run has passed.
        """
        times = RunTimes(
            start_s=self._started_s,
            admission_s=self._started_s,
            has_stepped=self._link.furthest_step > 0,
        )
        exceeded = exceeded_deadline(RunLimits.of(self._spec), times, self._clock())
        if exceeded is not None:
            raise RunFailedError(f"{exceeded.message} See the logs of the processes.")

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
        if (control := self._link.control) is None or not self._learner.serves:
            return
        try:
            await control.drain("interrupted by the user")
        except grpc.aio.AioRpcError as error:
            self._event("DrainFailed", error.details() or "the learner did not answer")
            return
        if not await self._fleet.wait_for_learner(_DRAIN_TIMEOUT_S):
            self._event("DrainTimedOut", f"the learner did not end within {_DRAIN_TIMEOUT_S:g} s")

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

    def _event(self, kind: str, message: str) -> None:
        record = EventRecord(time_unix_s=time.time(), source=_SOURCE, kind=kind, message=message)
        self._journal.event(record)
        self._view.event(f"{kind}: {message}")

    def _show_news(self) -> None:
        """Show what the learner has written down since the last time."""
        for line in self._feed.news():
            self._view.event(line)

    def _count_failure(self, part: str, child: ChildProcess) -> None:
        cause = "hung" if child.hung_s else "ended"
        self._metrics.failures.labels(_LOCAL, self._run.metadata.name, part, cause).inc()

    def _export(self, decision: ControlDecision) -> None:
        name = self._run.metadata.name
        for condition in decision.conditions:
            self._metrics.set_condition(_LOCAL, name, condition.type, condition.status)
        for group, wanted in decision.replicas.items():
            ready = sum(child.ready is not None for child in self._fleet.workers[group])
            self._metrics.replicas.labels(_LOCAL, name, group, "desired").set(wanted)
            self._metrics.replicas.labels(_LOCAL, name, group, "ready").set(ready)
        fed = decision.condition(ConditionType.LEARNER_FED)
        self._metrics.decisions.labels(_LOCAL, name, decision.direction, fed.reason).inc()

    def _show(self, decision: ControlDecision) -> None:
        running = self._link.phase is RunPhase.RUNNING
        self._view.update(
            run_view(
                self._run,
                self._link.latest,
                signals_age_s=self._link.age_s,
                learner_serves=self._learner.serves,
                workers_desired=sum(decision.replicas.values()) if running else 0,
                elapsed_s=self._clock() - self._started_s,
            )
        )
