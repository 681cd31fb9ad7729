"""A rank other than 0: it trains with rank 0 and does what that one says, until the end.

It writes its shard of each version for workers, which hear of it from rank 0. It answers health
checks and exports metrics of its process, so hosts supervise all ranks alike. A request to stop is
for rank 0, which needs the others to save: it ends them when it has.
"""

import asyncio
import gc
import logging
import time

from vcpo.api import VCPORun, load_run
from vcpo.metrics import serve_metrics
from vcpo.metrics.registry import PartRegistry
from vcpo.service import logs
from vcpo.service.lifecycle import on_stop_request, split_address, start_errors
from vcpo.service.plugins import import_from_run_folder
from vcpo.wire.access.roles import LEARNER_ROLES, keys_from_environment
from vcpo.wire.access.tls import checked_folder
from vcpo.wire.server import WireServer
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.options import Options
from vcpo_learner.ranks.ranks import RankEnvironment
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks
from vcpo_learner.training.publication import ShardPublication
from vcpo_learner.weights.store import PolicyStore, VersionFolder

_LOGGER = logging.getLogger(__name__)


async def run_follower(options: Options, environment: RankEnvironment) -> None:
    """Train with rank 0 until it ends this rank.

    Raises:
        LostRankError: if rank 0 or another rank is gone.
    """
    with start_errors():
        run = load_run(options.run_file)
        import_from_run_folder(run)
        logs.identify_process(run=run.metadata.name, rank=str(environment.rank))
        policy = await asyncio.to_thread(PolicyOnRanks.load, run.spec, environment)
    on_stop_request(_stay)
    await _follow(policy, options, environment, run)


async def _follow(
    policy: PolicyOnRanks, options: Options, environment: RankEnvironment, run: VCPORun
) -> None:
    """Serve health, metrics and the shard while the tensor thread follows rank 0."""
    ranks = policy.ranks
    with start_errors():
        keys = keys_from_environment(LEARNER_ROLES) or None
        server = WireServer(keys=keys)
        certificates = checked_folder(
            {"--listen": options.listen}, options.tls, plain_text=options.plain_text
        )
        folder = VersionFolder.open(
            run.spec.weights,
            run.metadata.name,
            options.run_dir,
            incarnation=ranks.incarnation,
            shard=ranks.shard,
        )
        weight_server = options.weight_server(folder, keys=keys, number=environment.local_rank)
        host, port = split_address(_own_port(options.metrics_listen, environment))
        endpoint = serve_metrics(PartRegistry("learner", run=run.metadata.name), host, port)
    with endpoint:
        with start_errors():
            health = options.health_listen
            grpc_port = await server.start(
                _own_port(options.listen, environment),
                (),
                certificates=certificates,
                health_address=None if health is None else _own_port(health, environment),
            )
            options.report_ready(grpc_port=grpc_port, metrics_port=endpoint.port)
        if weight_server is not None:
            weight_server.start()
        store = PolicyStore(folder, incarnation=ranks.incarnation, clock=time.monotonic)
        publication = ShardPublication(
            published=PublishedState(policy.model, store.full_set_memory),
            ranks=ranks,
            commands=policy.commands,
            store=store,
            weight_server=weight_server,
            event_loop=asyncio.get_running_loop(),
        )
        _LOGGER.info("rank %d follows rank 0", environment.rank)
        gc.freeze()
        try:
            await asyncio.to_thread(policy.commands.follow)
            await asyncio.to_thread(policy.close)
        finally:
            # While the event loop still runs: the version in hand needs it.
            await asyncio.to_thread(publication.close)
            closing = [] if weight_server is None else [weight_server.close(0.0)]
            await asyncio.gather(server.stop(0.0), *closing)
            await asyncio.to_thread(folder.empty)


def _own_port(address: str, environment: RankEnvironment) -> str:
    if environment.local_rank == 0:
        return address
    return f"{split_address(address)[0]}:0"


def _stay(reason: str) -> None:
    _LOGGER.info("%s: this rank ends with rank 0", reason)
