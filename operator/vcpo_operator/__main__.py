"""`python -m vcpo_operator`: operate the runs of a cluster."""

import argparse
import asyncio
import logging
import signal

from vcpo.metrics import OperatorMetrics, serve_metrics
from vcpo.service import logs
from vcpo.service.lifecycle import split_address
from vcpo_operator.app import Operator, Options
from vcpo_operator.children.network import IngressSources, OperatorDefaults
from vcpo_operator.cluster_api.client import ApiError, Cluster, missing_rights

_LOGGER = logging.getLogger(__name__)
_TALKATIVE = ("kopf.objects", "kopf.activities.probe", "aiohttp.access")
"""Loggers with a line for each event of an object, or for each probe of the kubelet."""


def main() -> int:
    """Operate as the command line says."""
    arguments = parser().parse_args()
    logs.configure("operator", form=logs.LogForm(arguments.log_format))
    for each in _TALKATIVE:
        logging.getLogger(each).setLevel(logging.WARNING)
    logging.getLogger("vcpo_operator").setLevel(arguments.log_level.upper())
    try:
        asyncio.run(_operate(arguments))
    except (OSError, ValueError) as error:
        logs.report_end(str(error))
        return 2
    return 0


async def _operate(arguments: argparse.Namespace) -> None:
    metrics = OperatorMetrics()
    cluster = Cluster.from_environment(
        lambda verb, resource, code: metrics.api_requests.labels(verb, resource, str(code)).inc()
    )
    options = _options(arguments)
    try:
        missing = await missing_rights(cluster, options.namespaces)
    except ApiError as error:
        _LOGGER.warning("cannot ask which rights the operator has: %s", error)
    else:
        if missing:
            raise ValueError(missing)
    host, port = split_address(arguments.metrics_listen)
    stop = asyncio.Event()
    # Acts until kopf sets its own handler. The first process of a container ignores this signal
    # unless it has a handler.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        with serve_metrics(metrics.registry, host, port):
            await Operator(options, cluster, metrics).run(stop)
    finally:
        cluster.close()


def operator_defaults(arguments: argparse.Namespace) -> OperatorDefaults:
    """Return what the command line says of the pods of runs."""
    ingress_sources = IngressSources(
        operator_namespace=arguments.operator_namespace,
        monitoring_namespaces=tuple(_split_names(arguments.monitoring_namespaces)),
    )
    return OperatorDefaults(
        learner_image=arguments.learner_image,
        rollout_image=arguments.rollout_image,
        ingress_sources=ingress_sources,
        scrape_annotations=arguments.scrape_annotations,
        shared_pod_monitor=arguments.shared_pod_monitor,
        gpu_resource_name=arguments.gpu_resource_name,
        image_pull_secrets=_split_names(arguments.image_pull_secrets),
        listen_address=arguments.pods_listen,
        pod_environment={logs.FORM_VARIABLE: arguments.log_format},
    )


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        defaults=operator_defaults(arguments),
        namespaces=_split_names(arguments.namespaces),
        liveness_endpoint=f"http://{arguments.liveness_listen}/healthz",
        prometheus_url=arguments.prometheus_url or None,
        workers=arguments.workers,
    )


def _split_names(names: str) -> list[str]:
    return [name for name in names.split(",") if name]


def _not_empty(name: str) -> str:
    if not name:
        raise argparse.ArgumentTypeError("must be a name such as nvidia.com/gpu, got ''")
    return name


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    known = argparse.ArgumentParser(
        prog="python -m vcpo_operator",
        description="Operates VCPORuns: creates their pods, scales them, and writes their status.",
    )
    _add_pod_options(known)
    known.add_argument(
        "--namespaces", default="", help="namespaces to watch, separated by commas (default: all)"
    )
    known.add_argument(
        "--prometheus-url",
        default="",
        help="Prometheus from which to read the learners' signals (default: call the learners)",
    )
    known.add_argument(
        "--metrics-listen", default="0.0.0.0:8080", help="address of /metrics, host:port"
    )
    known.add_argument(
        "--liveness-listen", default="0.0.0.0:8081", help="address of /healthz, host:port"
    )
    known.add_argument("--workers", type=int, default=8, help="runs reconciled in parallel")
    known.add_argument(
        "--log-format",
        choices=sorted(logs.LogForm),
        default="text",
        help="format of log lines, of the operator and of runs",
    )
    known.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least level of the operator's log lines",
    )
    return known


def _add_pod_options(known: argparse.ArgumentParser) -> None:
    pods = known.add_argument_group("pods of runs")
    pods.add_argument("--learner-image", required=True, help="image of learners that name none")
    pods.add_argument(
        "--rollout-image", required=True, help="image of rollout workers that name none"
    )
    pods.add_argument(
        "--operator-namespace",
        default="",
        help="namespace of the operator's own pod; runs' network policies allow calls from it"
        " (default: none)",
    )
    pods.add_argument(
        "--monitoring-namespaces",
        default="",
        help="namespaces that may read the metrics of runs, separated by commas, besides each run's"
        " own (default: none)",
    )
    pods.add_argument(
        "--scrape-annotations",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="annotate pods with prometheus.io/scrape, port and path (default: yes)",
    )
    pods.add_argument(
        "--shared-pod-monitor",
        action="store_true",
        help="a PodMonitor selects the pods of all runs already, so runs get none of their own",
    )
    pods.add_argument(
        "--gpu-resource-name",
        type=_not_empty,
        default="nvidia.com/gpu",
        help="name under which nodes offer GPUs, for runs that name none (default: %(default)s)",
    )
    pods.add_argument(
        "--pods-listen",
        default="0.0.0.0",  # noqa: S104 - network policies say who may connect
        help="address at which learners and workers listen; [::] for IPv6 (default: %(default)s)",
    )
    pods.add_argument(
        "--image-pull-secrets",
        default="",
        help="Secrets with which nodes pull the images of runs that name none, separated by commas",
    )


if __name__ == "__main__":
    raise SystemExit(main())
