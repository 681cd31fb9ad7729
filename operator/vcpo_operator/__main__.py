"""`python -m vcpo_operator`: look after the runs of a cluster."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time

import kopf

from vcpo.metrics import OperatorMetrics, serve_metrics
from vcpo.service.lifecycle import split_address
from vcpo_operator.app import Operator, Options
from vcpo_operator.children.family import OperatorDefaults
from vcpo_operator.children.network import IngressSources
from vcpo_operator.cluster_api.client import Cluster
from vcpo_operator.cluster_api.lease import LeaderLease, LeaseLostError

_LOG_FORMATS = {"text": kopf.LogFormat.FULL, "json": kopf.LogFormat.JSON}


def main() -> int:
    """Operate as the command line says.

    Returns 0 when asked to stop, 1 when the lease was lost, 2 when something must be put right.
    """
    arguments = parser().parse_args()
    kopf.configure(log_format=_LOG_FORMATS[arguments.log_format])
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # else a line for every event
    logging.getLogger("vcpo_operator").setLevel(arguments.log_level.upper())
    try:
        asyncio.run(_operate(arguments))
    except LeaseLostError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


async def _operate(arguments: argparse.Namespace) -> None:
    metrics = OperatorMetrics()
    cluster = Cluster.from_environment(
        lambda verb, resource, code: metrics.api_requests.labels(verb, resource, str(code)).inc()
    )
    identity = os.environ.get("POD_NAME") or socket.gethostname()
    lease = _lease(arguments, cluster, identity)
    options = Options(
        defaults=OperatorDefaults(
            learner_image=arguments.learner_image,
            rollout_image=arguments.rollout_image,
            ingress_sources=IngressSources(
                operator_namespace=arguments.operator_namespace,
                monitoring_namespaces=tuple(_listed(arguments.monitoring_namespaces)),
            ),
        ),
        namespaces=_listed(arguments.namespaces),
        liveness_endpoint=f"http://{arguments.liveness_listen}/healthz",
        prometheus_url=arguments.prometheus_url or None,
        workers=arguments.workers,
        identity=identity,
    )
    host, port = split_address(arguments.metrics_listen)
    stop = asyncio.Event()
    # Until kopf has handlers of its own; without one, a process that is its container's first is
    # deaf to this signal.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        with serve_metrics(metrics.registry, host, port):
            await Operator(options, cluster, metrics).run(stop, lease)
    finally:
        cluster.close()


def _lease(arguments: argparse.Namespace, cluster: Cluster, identity: str) -> LeaderLease | None:
    if not arguments.lease_namespace:
        return None
    return LeaderLease(
        cluster=cluster,
        namespace=arguments.lease_namespace,
        name=arguments.lease_name,
        identity=identity,
        clock=time.monotonic,
    )


def _listed(names: str) -> list[str]:
    return [name for name in names.split(",") if name]


def parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    known = argparse.ArgumentParser(
        prog="python -m vcpo_operator",
        description="Looks after VCPORuns: makes their pods, steers them, reports in their status.",
    )
    known.add_argument("--learner-image", required=True, help="image of learners by default")
    known.add_argument("--rollout-image", required=True, help="image of rollout workers by default")
    known.add_argument(
        "--namespaces", default="", help="watch these, separated by commas (default: all)"
    )
    known.add_argument(
        "--operator-namespace",
        default="",
        help="namespace of this pod, whose calls runs' network policies let in (default: none)",
    )
    known.add_argument(
        "--monitoring-namespaces",
        default="",
        help="namespaces that may read the metrics of runs, separated by commas, besides each run's"
        " own (default: none)",
    )
    known.add_argument(
        "--prometheus-url",
        default="",
        help="read the signals of learners there, instead of asking them (default: ask them)",
    )
    known.add_argument("--metrics-listen", default="0.0.0.0:8080", help="/metrics host:port")
    known.add_argument("--liveness-listen", default="0.0.0.0:8081", help="/healthz host:port")
    known.add_argument("--workers", type=int, default=8, help="runs looked at in parallel")
    known.add_argument(
        "--lease-namespace", default="", help="act only while holding a Lease here (default: none)"
    )
    known.add_argument("--lease-name", default="vcpo-operator", help="name of that Lease")
    known.add_argument("--log-format", choices=sorted(_LOG_FORMATS), default="text")
    known.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return known


if __name__ == "__main__":
    raise SystemExit(main())
