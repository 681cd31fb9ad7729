"""Which package a tracking service needs, and how its sink is found and opened.

A sink's module is imported where a run names it: most runs need none, and the core holds no heavy
package. `package.module:Class` of the user's own comes in by the same door as the shipped sinks.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, cast

from vcpo.api import FieldProblem, SpecError, VCPORun
from vcpo.api.tracking import Sink as SinkSettings
from vcpo.api.tracking import SinkName
from vcpo.service.plugins import (
    beside_or_in,
    import_from_run_folder,
    import_named,
    require_arguments,
    require_class,
)
from vcpo.tracking.sink import Sink, TrackedRun

_SHIPPED: Final[Mapping[str, str]] = MappingProxyType(
    {
        SinkName.TENSORBOARD: "vcpo.tracking.tensorboard:TensorBoardSink",
        SinkName.WANDB: "vcpo.tracking.weights_and_biases:WandbSink",
    }
)
_PACKAGES: Final[dict[str, str]] = {SinkName.TENSORBOARD: "tensorboardX", SinkName.WANDB: "wandb"}
"""Package of each shipped service's client; the extra `tracking` has them all."""
_METHODS: Final = ("sent_steps", "step", "evaluation", "event", "close")


def check_sinks(run: VCPORun) -> None:
    """Check that all sinks of a run can be opened here."""
    if problems := list(sink_problems(run)):
        raise SpecError("spec.tracking", problems)


def sink_problems(run: VCPORun) -> Iterator[FieldProblem]:
    """Yield each sink whose client or class is not installed here, with the fix.

    It imports the user's own classes.
    """
    import_from_run_folder(run)
    for index, sink in enumerate(run.spec.tracking.sinks):
        field = f"spec.tracking.sinks[{index}].name"
        package = _PACKAGES.get(sink.name)
        if package is None:
            try:
                _find(sink, field)
            except ValueError as error:
                path, _, message = str(error).partition(": ")
                yield FieldProblem(path=path, value="", message=message)
        elif importlib.util.find_spec(package) is None:
            yield FieldProblem(
                path=field,
                value=repr(sink.name),
                message=f"needs the package {package}, which is not installed; pip install"
                " 'vcpo[tracking]'",
            )


def open_sink(settings: SinkSettings, tracked: TrackedRun) -> Sink:
    """Open a sink; it may take seconds, and the service's client may raise any error."""
    # A run reports nothing to third parties but what it was told to send.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import_from_run_folder(tracked.run)
    sink_class = _find(settings, "spec.tracking.sinks[].name")
    return cast("Sink", sink_class(settings=settings, tracked=tracked, **settings.parameters))


def _find(settings: SinkSettings, field: str) -> type:
    name = settings.name
    path, fix = _SHIPPED.get(name, name), beside_or_in("learner")
    found = import_named(path, field=field, fix=fix, name=name)
    sink_class = require_class(found, field=field, name=name, what="a sink", methods=_METHODS)
    require_arguments(
        sink_class,
        settings.parameters,
        beside=("settings", "tracked"),
        field=f"{field.removesuffix('.name')}.parameters",
        name=name,
    )
    return sink_class
