"""Which package a tracking service needs, and how its sink is opened.

A sink's constructor imports its client, because most runs need none of them, and the core holds
no heavy package.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Final

from vcpo.spec import FieldProblem, SpecError
from vcpo.spec.tracking import Sink as SinkSettings
from vcpo.spec.tracking import SinkName, Tracking
from vcpo.tracking.mlflow import MlflowSink
from vcpo.tracking.sink import Sink, TrackedRun
from vcpo.tracking.tensorboard import TensorBoardSink
from vcpo.tracking.weights_and_biases import WandbSink

_PACKAGES: Final = {
    SinkName.TENSORBOARD: "tensorboardX",
    SinkName.WANDB: "wandb",
    SinkName.MLFLOW: "mlflow",
}
"""Package of each service's client; the extra `tracking` has them all."""

_PRIVATE: Final = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
"""A run reports nothing to third parties but what it was told to send."""


def check_packages(tracking: Tracking) -> None:
    """Check that the clients of all sinks are installed.

    Raises:
        SpecError: naming each missing package and the cure.
    """
    if problems := list(package_problems(tracking)):
        raise SpecError("spec.tracking", problems)


def package_problems(tracking: Tracking) -> Iterator[FieldProblem]:
    """Yield each sink whose client is not installed here, with the cure."""
    for index, sink in enumerate(tracking.sinks):
        if importlib.util.find_spec(_PACKAGES[sink.name]) is None:
            yield FieldProblem(
                path=f"spec.tracking.sinks[{index}].name",
                value=repr(sink.name.value),
                message=f"needs the package {_PACKAGES[sink.name]}, which is not installed; pip"
                " install 'vcpo[tracking]'",
            )


def open_sink(settings: SinkSettings, tracked: TrackedRun) -> Sink:
    """Open a sink; it may take seconds, and the service's client may raise any error."""
    for variable, value in _PRIVATE.items():
        os.environ.setdefault(variable, value)
    match settings.name:
        case SinkName.TENSORBOARD:
            return TensorBoardSink(settings, tracked)
        case SinkName.WANDB:
            return WandbSink(settings, tracked)
        case SinkName.MLFLOW:
            return MlflowSink(settings, tracked)
