"""A tracking service as the learner sees it, and the run whose numbers it gets, by name.

A sink's module is imported where a run names it: most runs need none, and the core holds no heavy
package. `package.module:Class` of the user's own comes in by the same door as the shipped sinks.
"""

import dataclasses
import html
import importlib.util
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, cast

from vcpo.api import FieldProblem, SpecError, VCPORun
from vcpo.api.tracking import Sink as SinkSettings
from vcpo.api.tracking import SinkName
from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.records.samples import Sample, read_evaluation
from vcpo.records.step_record import StepRecord
from vcpo.service.plugins import (
    beside_or_in,
    import_from_run_folder,
    import_named,
    require_arguments,
    require_class,
)

DEFAULT_PROJECT = "vcpo"
_SENT = {
    "model",
    "environment",
    "steps",
    "seed",
    "algorithm",
    "batch",
    "sampling",
    "optimizer",
    "evaluation",
}
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s\"]+@")
_FOLDER = "tracking"
"""Folder of a run directory with the ids of its runs in tracking services."""


Record = StepRecord | EvaluationRecord | EventRecord


class Sink(Protocol):
    """One run in one tracking service. Each call may block and may raise any error.

    The contract of `tracking.sinks[].name`. A class is called with the keyword arguments
    `settings` (the entry of `tracking.sinks`), `tracked` (the run), and the entry's `parameters`.
    It lives in a process of its own, so it never delays a step, and after an error it is opened
    anew.

    At a start the service says which steps it has, and gets the rest from the run's records; then
    come new records. A learner that resumes from a checkpoint may take steps again; each service
    deals with it in its own way, see `docs/watching.md`.
    """

    def sent_steps(self) -> Collection[int]:
        """Return the steps that the service has whole; none if it has none or cannot say."""

    def step(self, record: StepRecord) -> None:
        """Take the numbers of an optimizer step."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Take the result of an evaluation."""

    def event(self, record: EventRecord, step: int) -> None:
        """Take an event that happened after `step` optimizer steps."""

    def close(self, *, failed: bool) -> None:
        """Deliver what is left and end the run in the service."""


def deliver(sink: Sink, record: Record, step: int) -> None:
    """Hand a record to a sink. It may block and raise as the sink does.

    step: Steps taken when the record was made.
    """
    match record:
        case StepRecord():
            sink.step(record)
        case EvaluationRecord():
            sink.evaluation(record)
        case EventRecord():
            sink.event(record, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run and where it is."""

    run: VCPORun
    run_dir: Path
    is_copy: bool = False
    """Whether the records are copied afterwards, to a run of their own in the service."""

    @property
    def settings(self) -> dict[str, Any]:
        """What the run trains and how, for the service: sections by name, without URLs' passwords.

        Sections for the host alone, such as pod templates, stay here.
        """
        chosen = self.run.spec.model_dump_json(by_alias=True, include=_SENT, exclude_none=True)
        sent: dict[str, Any] = json.loads(_CREDENTIALS.sub("***@", chosen))
        return sent

    @property
    def title(self) -> str:
        return f"{self.run.metadata.name}{' (copy)' if self.is_copy else ''}"

    def known(self, sink: str) -> str | None:
        path = self.path(sink, "copy" if self.is_copy else "id")
        return path.read_text(encoding="utf-8") if path.exists() else None

    def keep(self, sink: str, text: str) -> str:
        """Keep and return an id or a step, so that a later start continues the same run there."""
        path = self.path(sink, "copy" if self.is_copy else "id")
        partial = path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
        return text

    def path(self, sink: str, ending: str) -> Path:
        folder = self.run_dir / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{sink}.{ending}"


TITLE: Final = "evaluation/samples"
COLUMNS: Final = ("prompt", "response", "reward", "parts", "tokens", "end")


def table_rows(settings: SinkSettings, tracked: TrackedRun, step: int) -> list[list[str | float]]:
    """Return a row for each answer that the evaluation at a step kept, in the order of `COLUMNS`.

    There is none if the service gets no texts.
    """
    if not settings.samples:
        return []
    return [_row(each) for each in read_evaluation(tracked.run_dir, step)]


def table_page(rows: Sequence[Sequence[str | float]]) -> str:
    """Return the table in Markdown, with texts that no viewer takes for markup."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(map(_cell, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(sample: Sample) -> list[str | float]:
    parts = ", ".join(f"{name} {value:g}" for name, value in sample.reward_parts.items())
    told: list[str | float] = [sample.prompt, sample.response, sample.reward, parts]
    return [*told, sample.response_tokens, sample.finish_reason]


def _cell(value: str | float) -> str:
    text = html.escape(value if isinstance(value, str) else f"{value:g}")
    for sign in "|`*_[]\\":
        text = text.replace(sign, f"&#{ord(sign)};")
    return "<br>".join(text.splitlines())


_GROUPS: Final = {
    "task": (
        "reward_mean reward_window_mean reward_window_error response_tokens_mean surprisal_nats"
        " cut_responses_ratio equal_groups_ratio prompt_tokens_mean prompt_tokens_max"
        " response_tokens_p05 response_tokens_p50 response_tokens_p95 reward_parts"
    ),
    "learner": (
        "step learning_rate gradient_norm step_s idle_s stage_s step_interval_s tokens_per_s"
        " ranks learner_peak_gibibytes attention_calls"
    ),
    "rollout": (
        "workers worker_peak_gibibytes weight_updates_in_flight adapter_swaps merged_versions"
        " leased in_flight buffered consumed dropped"
    ),
}
"""Fields of the record by the group in which services show them: `learner/step`."""
_GROUP_OF: Final = {name: group for group, names in _GROUPS.items() for name in names.split()}
_OF_WEIGHTS: Final = frozenset({"ess_ratio", "importance_weight_max", "baseline_shift"})
"""Fields that a step has only if every importance weight has a value."""
_ODD: Final = re.compile(r"[^\w.\- ]", re.ASCII)
"""Characters that a part of a name may not have, since not every service takes them."""
LAST_NAME: Final = "learner/step_skipped"
"""Name of the last number of a step: who has it of a step has all numbers of the step."""


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step by name, without those that this step does not have.

    `LAST_NAME` comes last.
    """
    missing = {"time_unix_s"}
    if record.skipped is not None:
        missing |= {"gradient_norm", "learning_rate", "learning_rate_schedule"}
        missing |= {"learning_rate_scale", "learning_rate_backoff"}
    if not record.has_weights:
        missing |= _OF_WEIGHTS
    shown: dict[str, float] = {}
    for each in dataclasses.fields(record):
        if each.name not in missing:
            name = f"{_GROUP_OF.get(each.name, 'off_policy')}/{each.name}"
            shown |= _numbers(name, getattr(record, each.name))
    if record.relative_ess_ratio is not None:
        shown["off_policy/relative_ess_ratio"] = record.relative_ess_ratio
    shown[LAST_NAME] = float(record.skipped is not None)
    return shown


def _numbers(name: str, value: object) -> dict[str, float]:
    """Return a number, or those of a mapping and of the mappings in it; words are left out."""
    if isinstance(value, int | float):
        return {name: float(value)}
    found: dict[str, float] = {}
    if isinstance(value, Mapping):
        for key, each in value.items():
            found |= _numbers(f"{name}/{_ODD.sub('_', str(key))}", each)
    return found


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """Return the numbers of an evaluation by name."""
    return {"evaluation/evaluation_accuracy": record.accuracy}


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
