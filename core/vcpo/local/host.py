"""The local host: it does on one machine what the operator does in a cluster.

Each turn supervises the processes, polls the learner's signals, lets `vcpo.control` decide, applies
the decision and updates the view. No turn waits for a process, so a process that starts or hangs
does not delay a deadline. While the learner does not answer, the last limits stay in force.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from vcpo.api import VCPORun
from vcpo.control.conditions import Condition, ConditionStatus, ConditionType
from vcpo.control.decision import ControlDecision, ControlState, decide
from vcpo.control.limits import ChangeKind
from vcpo.control.run_limits import RunTimes, exceeded_deadline, startup_deadline_s
from vcpo.control.signals import RunSignals
from vcpo.learner_control import SIGNALS_TIMEOUT_S, LearnerControl, call_failure
from vcpo.local.processes.child import Liveness, answers_health_check, free_port, wait_for_exit
from vcpo.local.processes.fleet import LEARNER_MODULE, Fleet, LostWorker, RunFailedError
from vcpo.local.processes.forks import ForkedProcess
from vcpo.local.processes.gpus import find_gpus
from vcpo.local.processes.learner import LearnerProcess
from vcpo.local.run_dir import RunDir
from vcpo.local.terminal.run_view import EventFeed, RunView, run_view
from vcpo.local.terminal.summary import Ending, RunOutcome, outcome_of_complete
from vcpo.local.terminal.view import LiveView, leave_lost_terminal
from vcpo.metrics import HostMetrics
from vcpo.metrics.hosted_runs import HostedRun, HostedRuns, Workers
from vcpo.records.journal import (
    HOST_STARTED,
    RUN_FAILED,
    EventRecord,
    EventTail,
    Journal,
    MetricsTail,
    read_events,
    read_metrics,
)
from vcpo.report import write_report
from vcpo.report.recorded_run import recorded_signals
from vcpo.service.lifecycle import DRAINED, on_parent_exit
from vcpo.wire.client import open_channel
from vcpo.wire.phase import RunPhase

LOOPBACK = "127.0.0.1"
"""Address at which the processes of a local run serve."""
_STARTING_POLL_S = 0.1
_STOP_GRACE_S = 15.0
_LOCAL = ""
"""Namespace label of a local run in the metrics."""
_SOURCE = "host"


class _InterruptedError(Exception):
    """The user interrupted the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options of the host that are not in the run's spec."""

    resume: bool
    metrics: HostMetrics
    """The metrics that the host sets; somebody else serves them."""
    metrics_port: int
    answer_timeout_s: float = SIGNALS_TIMEOUT_S
    """Timeout of health checks and of requests for signals."""
    ends_with_input: bool = False
    """Whether the end of standard input interrupts the run: whoever started the host is gone."""
    learner_module: str = LEARNER_MODULE
    """Module that runs as the learner; a benchmark gives one that paces its steps."""
    forks: Sequence[ForkedProcess] = ()
    """Processes that wait with their imports done."""
    clock: Callable[[], float] = time.monotonic


class Host:
    """Runs one VCPORun on this machine, from the first process to the last."""

    def __init__(self, run: VCPORun, run_dir: RunDir, view: LiveView, options: HostOptions) -> None:
        clock = options.clock
        self._run = run
        self._spec = run.spec
        self._run_dir = run_dir
        self._view = view
        self._options = options
        self._clock = clock
        self._fleet = Fleet(
            run, run_dir, gpus=find_gpus(), learner_module=options.learner_module, clock=clock
        )
        self._fleet.forks.extend(options.forks)
        self._learner = LearnerProcess(
            self._fleet, resume=options.resume, spec=run.spec, clock=clock
        )
        self._port = free_port()
        """The learner's port; workers know it before the learner serves."""
        self._control: LearnerControl | None = None
        """The connection to the learner, across its restarts; None before it first serves."""
        self._furthest_step = 0
        """Largest step of any learner; one that finds no checkpoint starts at 0 again."""
        self._liveness = Liveness(startup_deadline_s=run.spec.startup_deadline_seconds, clock=clock)
        self._journal = Journal(run_dir.path)
        self._tail = MetricsTail(run_dir.path, from_start=False)
        self._feed = EventFeed(EventTail(run_dir.path), own_source=_SOURCE)
        self._metrics = options.metrics
        self._learner_restarts = 0
        self._metrics_port = options.metrics_port
        self._state = ControlState.start(run.spec, now_s=clock())
        self._stale_age_s: float | None = None
        """Age of the signals when they were last seen to be too old; None while they are fresh."""
        self._started_s = clock()
        self._started_unix_s = time.time()
        self._name = (_LOCAL, run.metadata.name)
        self._hosted_runs = HostedRuns(self._metrics)
        self._interrupted = asyncio.Event()
        self._is_draining = False

    async def run(self) -> RunOutcome:
        """Run to the end, and stop every process of the run before returning."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted.set)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        if self._options.ends_with_input:
            on_parent_exit(lambda _: self._interrupted.set())
        try:
            outcome = await self._run_until_end()
            signals = recorded_signals(self._run, read_metrics(self._run_dir.path), time.time())
            phase = outcome.ending.phase
            self._view.update(replace(self._current_view(0), phase=phase, signals=signals))
            return outcome
        finally:
            await self._fleet.stop(_STOP_GRACE_S)
            if self._control is not None:
                await self._control.close()

    def _hang_up(self) -> None:
        """Interrupt the run, once: kernel and shell each tell of the end of a terminal."""
        leave_lost_terminal()
        if not self._is_draining:
            self._interrupted.set()

    async def _run_until_end(self) -> RunOutcome:
        goal = f"{self._run.metadata.name}: {self._spec.steps} steps"
        self._event(HOST_STARTED, f"{goal}, resumed" if self._options.resume else goal)
        self._event("MetricsServed", f"http://{LOOPBACK}:{self._metrics_port}/metrics")
        if description := self._fleet.gpu_plan.description:
            self._event("Gpus", description)
        try:
            while not await self._turn():
                poll_s = self._spec.control.poll_seconds
                await self._pause(poll_s if self._learner.serves else _STARTING_POLL_S)
        except _InterruptedError:
            await self._drain()
            return RunOutcome(ending=Ending.INTERRUPTED)
        except RunFailedError as error:
            self._show_events()
            self._event(RUN_FAILED, str(error))
            return RunOutcome(ending=Ending.FAILED, message=str(error))
        self._show_events()
        run_dir = self._run_dir.path
        outcome = outcome_of_complete(self._run, read_metrics(run_dir), read_events(run_dir))
        kind = "Collapsed" if outcome.ending is Ending.COLLAPSED else "Complete"
        self._event(kind, f"{self._spec.steps} steps. {outcome.message}".rstrip())
        return outcome

    async def _turn(self) -> bool:
        """Do one turn of the control loop; return True if the run is complete."""
        if self._supervise_learner():  # what a learner that cannot start says comes first
            return True
        for lost in self._fleet.reap():
            await self._report_loss(lost)
        await self._poll_processes()
        decision, self._state = decide(self._spec, self._state, self._signals, self._clock())
        self._report_freshness(decision.condition(ConditionType.SIGNALS_FRESH))
        await self._apply(decision)
        self._export(decision)
        self._check_deadlines()
        self._show_events()
        await self._rewrite_report()
        self._view.update(
            self._current_view(sum(decision.replicas.values()) if self._is_running else 0)
        )
        return False

    async def _rewrite_report(self) -> None:
        if self._tail.read().evaluations:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(write_report, self._run_dir.path)

    @property
    def _signals(self) -> RunSignals | None:
        return None if self._control is None else self._control.last_known()

    @property
    def _is_running(self) -> bool:
        signals = self._signals
        return signals is None or signals.phase is RunPhase.RUNNING

    def _current_view(self, workers_desired: int) -> RunView:
        return run_view(
            self._run,
            self._signals,
            learner_serves=self._learner.serves,
            workers_desired=workers_desired,
            elapsed_s=self._clock() - self._started_s,
        )

    def _supervise_learner(self) -> bool:
        """Start or restart the learner; return True if the run is complete."""
        ended = self._learner.take_end(step=self._furthest_step)
        if ended is not None:
            if ended.is_complete:
                return True
            self._learner_restarts += 1
            self._event("LearnerRestarted", ended.message)
        self._learner.start_when_due(self._port)
        if (ready := self._learner.take_ready()) is not None:
            if self._control is None:  # the next processes serve on the same port
                channel = open_channel(f"{LOOPBACK}:{self._port}", key=self._fleet.steering_key)
                self._control = LearnerControl(channel, clock=self._clock)
            num_ranks = len(self._learner.ranks)
            group = f"{num_ranks} ranks; rank 0 is " if num_ranks > 1 else ""
            where = f"{group}process {ready.pid}, metrics on port {ready.metrics_port}"
            self._event("LearnerStarted", where)
        return False

    async def _report_loss(self, lost: LostWorker) -> None:
        released = 0
        if (control := self._control) is not None and control.failure is None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                released = await control.release_all_leases(lost.child.name)
        message = f"{lost.child.name} {lost.child.describe_failure()}; {released} leases released"
        if lost.pause_s:
            message += f"; the next worker starts in {lost.pause_s:g} s"
        self._event("WorkerLost", message)

    async def _poll_processes(self) -> None:
        """Poll the learner's signals, check the health of every process, and kill hung ones.

        A learner that answers health checks is not hung, even if it returns no signals.
        """
        children = [child for group in self._fleet.workers.values() for child in group]
        children.extend(self._learner.ranks)
        timeout_s = self._options.answer_timeout_s
        health = asyncio.gather(*(answers_health_check(child, timeout_s) for child in children))
        _, answered = await asyncio.gather(self._poll(), health)
        for child, did_answer in zip(children, answered, strict=True):
            self._liveness.record(child, answered=did_answer)
            if self._liveness.is_hung(child):
                child.kill_hung(self._liveness.silent_s(child))
        self._liveness.retain(children)

    async def _poll(self) -> None:
        if self._control is None:
            return
        signals = await self._control.poll(timeout_s=self._options.answer_timeout_s)
        if signals is not None:
            self._furthest_step = max(self._furthest_step, signals.step)
            workers = signals.workers.items()
            self._fleet.record_productive(name for name, each in workers if each.accepted)

    def _report_freshness(self, fresh: Condition) -> None:
        """Write an event when the signals get too old to act on, and when they are fresh again."""
        control, signals = self._control, self._signals
        if control is None or signals is None:  # a learner that starts has not fallen silent
            return
        if fresh.status is ConditionStatus.TRUE:
            if self._stale_age_s is not None:
                self._event(
                    "SignalsFresh", f"the learner answers again after {self._stale_age_s:.0f} s"
                )
            self._stale_age_s = None
            return
        if control.failure is None:  # it answered; another process kept the host waiting since
            return
        if self._stale_age_s is None:
            self._event(
                "SignalsStale",
                f"the newest signals of the learner are {signals.age_s:.0f} s old"
                f" ({call_failure(control.failure)}): lag limit and workers stay as they are",
            )
        self._stale_age_s = signals.age_s

    async def _apply(self, decision: ControlDecision) -> None:
        control, signals = self._control, self._signals
        if control is None or signals is None:
            # Workers load while the learner does, and call it until it serves. An engine that
            # measures free memory must not do so while a neighbor on its GPU takes some.
            is_known = all(group.kv_cache_gibibytes for group in self._spec.rollouts)
            if is_known or not self._fleet.gpu_plan.is_shared:
                self._fleet.scale(decision.replicas, self._port, {})
            return
        if control.failure is None and signals.lag_limit_steps != decision.lag_limit_steps:
            try:
                await control.throttle(decision.lag_limit_steps, decision.lag_reason)
            except grpc.aio.AioRpcError:
                return  # the signals will still differ, so the next turn repeats the call
        for change in decision.changes:
            if change.kind is ChangeKind.SCALED:  # of the lag limit the learner writes the event
                self._event(change.kind, change.sentence)
        if signals.phase is RunPhase.RUNNING:
            busy = {name: each.in_flight for name, each in signals.workers.items()}
            self._fleet.scale(decision.replicas, self._port, busy)

    def _check_deadlines(self) -> None:
        times = self._times(self._started_s)
        exceeded = exceeded_deadline(self._spec, times, self._clock())
        if exceeded is not None:
            raise RunFailedError(f"{exceeded.message} See the logs of the processes.")

    def _times(self, started_s: float) -> RunTimes:
        """Return how far the run has come since `started_s`, on whichever clock that is."""
        return RunTimes(
            start_s=started_s, admission_s=started_s, has_stepped=self._furthest_step > 0
        )

    async def _drain(self) -> None:
        """Drain the learner, which writes a checkpoint; a second Ctrl-C kills all processes."""
        self._is_draining = True
        self._event(
            "Draining",
            "the learner finishes its step and saves a checkpoint, within"
            f" {self._spec.learner.drain_seconds} s (spec.learner.drainSeconds); press Ctrl-C again"
            " to stop at once",
        )
        draining = asyncio.create_task(self._drain_learner())
        second = asyncio.create_task(self._interrupted.wait())
        await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            signals = self._current_view(0).signals
            self._event(
                "Killed",
                "interrupted twice: the processes are killed without a checkpoint;"
                f" step {signals.step + 1}, if it has begun, and {signals.in_flight} responses in"
                " flight are lost",
            )
            self._fleet.kill()
        for task in (draining, second):
            task.cancel()
        await asyncio.gather(draining, second, return_exceptions=True)

    async def _drain_learner(self) -> None:
        """Ask the learner to save and to end, and show the wait until it has ended."""
        if (control := self._control) is None or not self._learner.serves:
            return
        leader, limit_s = self._learner.ranks[0], float(self._spec.learner.drain_seconds)
        started_s = self._clock()
        try:
            await control.drain("interrupted by the user")
        except grpc.aio.AioRpcError:
            leader.terminate()  # a signal asks the same of it
        while (waited_s := self._clock() - started_s) < limit_s:
            if not await wait_for_exit(self._fleet.learner_ranks, self._spec.control.poll_seconds):
                break
            await self._poll()
            self._show_events()
            self._view.update(replace(self._current_view(0), drain_s=waited_s))
        self._show_events()
        if leader.exit_code is None:
            self._event(
                "DrainTimedOut",
                f"the learner did not end within {limit_s:g} s and is stopped now;"
                " spec.learner.drainSeconds sets how long it may take",
            )
        elif leader.exit_code not in (0, DRAINED):
            self._event("DrainFailed", f"the learner {leader.describe_failure()}")

    async def _pause(self, duration_s: float) -> None:
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
        if kind != RUN_FAILED:  # the last words of the run say it
            self._view.event(f"{kind}: {message}")

    def _show_events(self) -> None:
        for line in self._feed.new_lines():
            self._view.event(line)

    def _export(self, decision: ControlDecision) -> None:
        run = HostedRun(
            spec=self._spec,
            labels=self._run.metadata.labels,
            conditions=decision.conditions,
            workers={
                group: Workers(
                    desired=desired,
                    ready=sum(child.ready is not None for child in self._fleet.workers[group]),
                )
                for group, desired in decision.replicas.items()
            },
            decision=decision,
            lag_limit_steps=decision.lag_limit_steps,
            signals_age_s=None if self._signals is None else self._signals.age_s,
            learner_restarts=self._learner_restarts,
            start_s=self._started_unix_s,
            startup_deadline_s=startup_deadline_s(self._spec, self._times(self._started_unix_s)),
        )
        self._hosted_runs.show(self._name, run)
