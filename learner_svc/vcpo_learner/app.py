"""Rank 0 of the learner: it builds the parts, serves them, trains, and shuts down in order."""

import asyncio
import contextlib
import gc
import logging
import time

from vcpo.algo.health.mismatch_review import MismatchError
from vcpo.api import VCPORun, VCPORunSpec, load_run
from vcpo.local.models import context_tokens
from vcpo.metrics import LearnerMetrics, serve_metrics
from vcpo.metrics.learner import lag_edges
from vcpo.service import logs
from vcpo.service.lifecycle import (
    StartError,
    on_parent_exit,
    on_stop_request,
    split_address,
    start_errors,
)
from vcpo.service.plugins import import_from_run_folder
from vcpo.service.run_lock import LockHolder, run_lock
from vcpo.service.vocabulary import num_tokens
from vcpo.tracking.follow import Followers
from vcpo.tracking.sink import check_sinks
from vcpo.wire.access.roles import LEARNER_ROLES, keys_from_environment
from vcpo.wire.access.tls import checked_folder
from vcpo.wire.phase import RunPhase
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import control_pb2_grpc, policy_pb2_grpc, work_pb2_grpc
from vcpo_learner.forward.router_replay import router_layout
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.ledger import AccountingError, TrajectoryLedger
from vcpo_learner.ledger.redo_log import RedoLog
from vcpo_learner.ledger.workers import TooManyFailuresError, WorkerRegistry
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.options import Options
from vcpo_learner.prompts.source import prompt_source
from vcpo_learner.ranks.ranks import RankEnvironment
from vcpo_learner.services.work import ControlService, PolicyService, ResponseBounds, WorkService
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.telemetry.step_log import RunRecords
from vcpo_learner.training.loop import TrainingLoop
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks
from vcpo_learner.troubles import Troubles
from vcpo_learner.weights.store import PolicyStore, VersionFolder

_LOGGER = logging.getLogger(__name__)
_SERVICES = [f"vcpo.wire.v1.{part}Service" for part in ("Work", "Policy", "Control")]
_REFRESH_S = 1.0
_STOP_GRACE_S = 2.0
_LOCK_PATIENCE_S = 60.0
"""How long to wait for the lock: the learner of a killed host drains and saves before it exits."""


async def run_learner(options: Options, environment: RankEnvironment) -> RunPhase:
    """Train, as rank 0, the run of `options` and return its last phase."""
    with contextlib.ExitStack() as held:
        with start_errors():
            lock = run_lock(options.run_dir, LockHolder.LEARNER, patience_s=_LOCK_PATIENCE_S)
            await asyncio.to_thread(held.enter_context, lock)
        return await _run_alone(options, environment)


async def _run_alone(options: Options, environment: RankEnvironment) -> RunPhase:
    """Build the learner, resume it if asked to, and serve it; the run directory is locked."""
    with start_errors():
        run = load_run(options.run_file)
        import_from_run_folder(run)
        logs.identify_process(run=run.metadata.name)
        check_sinks(run)
        policy = await asyncio.to_thread(PolicyOnRanks.load, run.spec, environment)
        learner = _Learner(run, options, policy)
        if options.resume:
            _LOGGER.info("resuming at step %d", learner.training.recovery.resume())
        else:
            learner.training.recovery.require_unused()
    followers = Followers()
    followers.start(run, options.run_file, options.run_dir)
    on_stop_request(learner.drain)
    if options.exit_with_parent:
        on_parent_exit(learner.drain)
    try:
        return await learner.serve(options)
    finally:
        await asyncio.to_thread(followers.close)
        await asyncio.to_thread(learner.log.close)
        await asyncio.to_thread(policy.close)


def _ledger(spec: VCPORunSpec, incarnation: str, log: RedoLog) -> TrajectoryLedger:
    return TrajectoryLedger(
        prompts_per_step=spec.batch.prompts_per_step,
        trajectories_per_prompt=spec.batch.trajectories_per_prompt,
        lease_timeout_s=spec.lease.timeout_seconds,
        group_filter=spec.algorithm.loss_config.group_filter,
        prompt_source=prompt_source(spec),
        incarnation=incarnation,
        clock=time.monotonic,
        log=log,
    )


class _Learner:
    """The parts of one learner, connected. Owner: the event loop, but for the model's tensors."""

    def __init__(self, run: VCPORun, options: Options, policy: PolicyOnRanks) -> None:
        spec = run.spec
        incarnation = policy.ranks.incarnation
        logs.identify_process(incarnation=incarnation)
        self._drain_s = options.drain_s
        self._stop_requested = asyncio.Event()
        self.registry = WorkerRegistry(time.monotonic)
        records = RunRecords(options.run_dir)
        troubles = Troubles(spec, time.monotonic, records.event)
        self.log = RedoLog(options.run_dir, troubles.tell)
        self.dispatcher = Dispatcher(
            spec=spec,
            ledger=_ledger(spec, incarnation, self.log),
            registry=self.registry,
            troubles=troubles,
            incarnation=incarnation,
            clock=time.monotonic,
        )
        self.signals = SignalWindow(
            batch_trajectories=spec.batch.trajectories,
            dispatcher=self.dispatcher,
            clock=time.monotonic,
        )
        self.metrics = LearnerMetrics(
            run=run.metadata.name, lag_edges=lag_edges(spec.algorithm.max_policy_lag_steps)
        )
        self.gauges = LearnerGauges(self.metrics, dispatcher=self.dispatcher, signals=self.signals)
        self.keys = keys_from_environment(LEARNER_ROLES)
        self.folder = VersionFolder.open(
            spec.weights, run.metadata.name, options.run_dir, incarnation=incarnation, shard=0
        )
        self.weight_server = options.weight_server(self.folder, keys=self.keys)
        self.policies = PolicyStore(self.folder, incarnation=incarnation, clock=time.monotonic)
        self.training = TrainingLoop(
            run_object=run,
            run_dir=options.run_dir,
            policy=policy,
            published=PublishedState(policy.model, self.policies.full_set_memory),
            policies=self.policies,
            weight_server=self.weight_server,
            dispatcher=self.dispatcher,
            log=self.log,
            signals=self.signals,
            gauges=self.gauges,
            records=records,
            troubles=troubles,
            clock=time.monotonic,
        )
        self._spec = spec
        self._bounds = ResponseBounds.from_spec(
            spec,
            vocabulary_size=num_tokens(policy.model),
            model_context_tokens=context_tokens(policy.model.config.to_dict()),
            routers=router_layout(policy.model),
        )

    def drain(self, reason: str) -> None:
        """Stop granting work; the training loop saves and ends. A learner that lingers exits."""
        self._stop_requested.set()
        if self.dispatcher.drain():
            self.training.event("Draining", reason)

    async def serve(self, options: Options) -> RunPhase:
        """Serve until the training has ended, and `linger_s` seconds longer; return the phase."""
        server = WireServer(keys=self.keys or None)
        work_pb2_grpc.add_WorkServiceServicer_to_server(
            WorkService(self.dispatcher, self._spec, self._bounds),
            server.grpc_server,
        )
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(
            PolicyService(self.policies, self.dispatcher), server.grpc_server
        )
        control_pb2_grpc.add_ControlServiceServicer_to_server(
            ControlService(
                dispatcher=self.dispatcher,
                signals=self.signals,
                drain=self.drain,
                event=self.training.event,
            ),
            server.grpc_server,
        )
        with start_errors():
            certificates = checked_folder(
                {"--listen": options.listen}, options.tls, plain_text=options.plain_text
            )
            metrics_host, metrics_port = split_address(options.metrics_listen)
            endpoint = serve_metrics(self.metrics.registry, metrics_host, metrics_port)
        with endpoint:
            with start_errors():
                port = await server.start(
                    options.listen,
                    _SERVICES,
                    certificates=certificates,
                    health_address=options.health_listen,
                )
            _LOGGER.info("serving on port %d, metrics on %d", port, endpoint.port)
            with start_errors():
                options.report_ready(grpc_port=port, metrics_port=endpoint.port)
            weights = self.weight_server
            if weights is not None:
                weights.start()
            gc.freeze()  # a search of torch's 400,000 objects takes 0.4 s
            refreshing = asyncio.create_task(self._refresh())
            try:
                return await self._train(options.linger_s)
            finally:
                refreshing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await refreshing
                closing = [] if weights is None else [weights.close(_STOP_GRACE_S)]
                await asyncio.gather(server.stop(_STOP_GRACE_S), *closing)
                await asyncio.to_thread(self.folder.empty)

    async def _train(self, linger_s: float) -> RunPhase:
        try:
            phase = await self.training.run(self._drain_s)
        except AccountingError as error:
            self.gauges.metrics.accounting_errors.inc()
            self._fail(str(error))
            raise
        except (MismatchError, StartError, TooManyFailuresError) as error:
            self._fail(str(error))
            await self._linger(linger_s)
            raise StartError(str(error)) from error
        await self._linger(linger_s)
        return phase

    def _fail(self, why: str) -> None:
        self.signals.failure = why
        self.dispatcher.abort()

    async def _linger(self, linger_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger_s):
                await self._stop_requested.wait()

    async def _refresh(self) -> None:
        """Keep metrics up to date until cancelled.

        An error does not end the run. It is logged, unless it repeats the one before.
        """
        logged = ""
        while True:
            try:
                self.gauges.refresh()
                if (weights := self.weight_server) is not None:
                    self.gauges.count_served_weights(weights.sent_bytes)
            except Exception as error:  # metrics may not end a run
                if repr(error) != logged:
                    _LOGGER.exception("cannot update metrics; the run continues")
                logged = repr(error)
            await asyncio.sleep(_REFRESH_S)
