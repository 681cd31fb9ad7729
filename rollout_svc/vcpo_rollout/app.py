"""The worker's process: builds the parts, serves health and metrics, works, and shuts down."""

import asyncio
import gc
import logging
import zlib
from dataclasses import dataclass

import grpc

from vcpo.api import VCPORun, VCPORunSpec, load_run
from vcpo.api.workloads import OverlongPrompts, RolloutGroup
from vcpo.metrics import MetricsServer, RolloutMetrics, serve_metrics
from vcpo.service import logs
from vcpo.service.lifecycle import (
    ServiceOptions,
    on_parent_exit,
    on_stop_request,
    split_address,
    start_errors,
)
from vcpo.service.model_files import local_model
from vcpo.service.plugins import import_from_run_folder
from vcpo.wire.access.roles import WORKER_ROLES, CallerRole, RoleKeys, keys_from_environment
from vcpo.wire.access.tls import CertificateFolder, checked_folder
from vcpo.wire.client import open_channel
from vcpo.wire.phase import RunPhase
from vcpo.wire.server import WireServer
from vcpo_rollout.engines.adapters import AdapterUse
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.engines.engine import Engine, ObservableEngine
from vcpo_rollout.engines.factory import load_engine, plan_weights
from vcpo_rollout.environments.environment import Environment
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.environment_pool import EnvironmentThreads
from vcpo_rollout.generation.responses import ResponseGenerator
from vcpo_rollout.generation.rewards import make_task
from vcpo_rollout.generation.worker import Worker
from vcpo_rollout.transport.learner_client import LearnerClient
from vcpo_rollout.transport.weight_files import WeightFiles
from vcpo_rollout.weights.postprocess import WeightPostprocessing, make_postprocessing
from vcpo_rollout.weights.receiver import WeightFetcher, WeightReceiver

_LOGGER = logging.getLogger(__name__)
_STOP_GRACE_S = 1.0
_AUTHORITY_POLL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ServiceOptions):
    """The options of the command line; see `python -m vcpo_rollout --help`."""

    learner: str
    group: str
    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What a worker is to do and whom it may call, before its engine starts."""

    options: Options
    run: VCPORun
    group: RolloutGroup
    environment: Environment
    metrics: RolloutMetrics
    endpoint: MetricsServer
    keys: RoleKeys
    certificates: CertificateFolder | None
    channel: grpc.aio.Channel


def _read(options: Options) -> _Setting:
    with start_errors():
        run = load_run(options.run_file)
        logs.identify_process(run=run.metadata.name)
        group = rollout_group(run, options.group)
        import_from_run_folder(run)
        keys = keys_from_environment(WORKER_ROLES)
        addresses = {"--listen": options.listen, "--learner": options.learner}
        certificates = checked_folder(addresses, options.tls, plain_text=options.plain_text)
        metrics = RolloutMetrics(run=run.metadata.name, group=group.name)
        return _Setting(
            options=options,
            run=run,
            group=group,
            environment=make_task(run.spec.environment, run.spec.seed),
            metrics=metrics,
            keys=keys,
            certificates=certificates,
            channel=open_channel(
                options.learner,
                key=keys.get(CallerRole.WORKER),
                trust=None if certificates is None else certificates.trust(),
            ),
            endpoint=serve_metrics(metrics.registry, *split_address(options.metrics_listen)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """What a worker loads of its model."""

    postprocess: WeightPostprocessing | None
    adapters: AdapterUse | None
    engine: Engine
    codec: PromptCodec


async def run_worker(options: Options) -> RunPhase:
    """Work for the learner of `options`; return the run's last known phase.

    Raises:
        EngineError: when the engine died.
    """
    setting = _read(options)
    server = WireServer(keys=setting.keys or None)
    with setting.endpoint:
        try:
            with start_errors():
                port = await server.start(
                    options.listen,
                    (),
                    serving=False,
                    certificates=setting.certificates,
                    health_address=options.health_listen,
                )
                # Of what a worker draws for itself, the noise on its weights; leases seed the rest.
                seed = zlib.crc32(f"{setting.run.spec.seed}/{options.worker_id}".encode())
                loaded = await asyncio.to_thread(
                    load_sampler, setting.run, setting.group, seed=seed
                )
            return await _work(setting, loaded, server, port)
        finally:
            await server.stop(_STOP_GRACE_S)
            await setting.channel.close()


async def _work(setting: _Setting, loaded: Sampler, server: WireServer, port: int) -> RunPhase:
    worker = _worker(setting, loaded)
    gc.freeze()
    _report_start(setting.options, worker, grpc_port=port, metrics_port=setting.endpoint.port)
    beside = [asyncio.create_task(_serve_when_ready(worker.receiver, server))]
    if setting.certificates is not None:
        beside.append(asyncio.create_task(_end_with_authority(setting.certificates, worker)))
    try:
        return await worker.run()
    finally:
        for task in beside:
            task.cancel()
        await loaded.engine.close()


def _worker(setting: _Setting, loaded: Sampler) -> Worker:
    options, spec, group = setting.options, setting.run.spec, setting.group
    gauges = RolloutGauges(setting.metrics)
    if isinstance(loaded.engine, ObservableEngine):
        loaded.engine.export_to(gauges)
    learner = LearnerClient(
        setting.channel,
        worker_id=options.worker_id,
        rollout_group=group.name,
    )
    files = WeightFiles(
        options.learner,
        gauges,
        key=setting.keys.get(CallerRole.WORKER),
        certificates=setting.certificates,
    )
    return Worker(
        learner=learner,
        receiver=WeightReceiver(
            learner=learner,
            engine=loaded.engine,
            gauges=gauges,
            fetcher=WeightFetcher(files),
            postprocess=loaded.postprocess,
            adapters=loaded.adapters,
        ),
        responses=response_generator(spec, group, loaded, setting.environment, gauges),
        gauges=gauges,
        max_concurrent_sequences=group.max_concurrent_sequences,
        sequences_per_prompt=spec.batch.trajectories_per_prompt,
        drain_s=options.drain_s,
    )


def response_generator(
    spec: VCPORunSpec,
    group: RolloutGroup,
    sampler: Sampler,
    environment: Environment,
    gauges: RolloutGauges,
) -> ResponseGenerator:
    """Return what answers prompts of a run, in a worker and in a trial."""
    threads = EnvironmentThreads(
        group.max_concurrent_sequences, gauges=gauges, timeout_s=spec.environment_timeout_s
    )
    return ResponseGenerator(
        engine=sampler.engine,
        environment=environment,
        codec=sampler.codec,
        gauges=gauges,
        threads=threads,
        truncates_prompts=spec.environment.overlong_prompts is OverlongPrompts.TRUNCATE,
    )


def load_sampler(run: VCPORun, group: RolloutGroup, *, seed: int) -> Sampler:
    """Load the postprocessing of weights, the engine and the codec; it takes seconds."""
    spec = run.spec
    # The model may have to be fetched; its weights are needed only beside adapters.
    name = local_model(spec.model.name, with_weights=spec.model.lora is not None)
    model = spec.model.model_copy(update={"name": name})
    spec = spec.model_copy(update={"model": model})
    plan = plan_weights(spec, group)
    # Before the engine: if this fails, there are no processes of the engine to stop.
    postprocess = make_postprocessing(
        spec, group, seed=seed, rounding=plan.rounding, adapters=plan.adapters
    )
    engine, codec = load_engine(spec, group, plan, seed=seed, today=run.start_date)
    return Sampler(postprocess=postprocess, adapters=plan.adapters, engine=engine, codec=codec)


def _report_start(options: Options, worker: Worker, *, grpc_port: int, metrics_port: int) -> None:
    on_stop_request(lambda _: worker.shut_down())
    if options.exit_with_parent:
        on_parent_exit(lambda _: worker.shut_down())
    options.report_ready(grpc_port=grpc_port, metrics_port=metrics_port)
    _LOGGER.info("working as %s for %s", options.worker_id, options.learner)


async def _serve_when_ready(receiver: WeightReceiver, server: WireServer) -> None:
    await receiver.wait_for_other(None)
    await server.set_serving(serving=True)


async def _end_with_authority(certificates: CertificateFolder, worker: Worker) -> None:
    """Shut down when another authority signs the run's certificates; the next process trusts it."""
    trust = certificates.trust()
    while certificates.trust() == trust:
        await asyncio.sleep(_AUTHORITY_POLL_S)
    _LOGGER.info("another authority signs the certificates of the run: this worker ends")
    worker.shut_down()


def rollout_group(run: VCPORun, name: str) -> RolloutGroup:
    """Return the rollout group of a run by its name."""
    groups = {group.name: group for group in run.spec.rollouts}
    if name not in groups:
        known = ", ".join(groups)
        raise ValueError(f"--group: must be a rollout group of the run ({known}), got {name!r}")
    return groups[name]
