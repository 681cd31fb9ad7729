"""MLflow, by its client; the server may be a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping

from vcpo.api.tracking import Sink as SinkSettings
from vcpo.api.tracking import SinkName
from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.records.step_record import StepRecord
from vcpo.tracking.sample_table import TITLE, table_page, table_rows
from vcpo.tracking.scalars import LAST_NAME, evaluation_scalars, step_scalars
from vcpo.tracking.sink import DEFAULT_PROJECT, TrackedRun

_MAX_PARAMETER_CHARACTERS = 6000


class MlflowSink:
    """One run of an experiment, continued under the same id after a restart.

    The service keeps every value of a step that it is sent. So steps that a restarted learner takes
    again are not sent: the service keeps those of the first time.
    """

    def __init__(self, settings: SinkSettings, tracked: TrackedRun) -> None:
        url = settings.url or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not url:  # the client would choose a database, which it cannot open
            raise ValueError(
                "url: is not set, and neither is MLFLOW_TRACKING_URI; give the address of a server"
                " or a folder such as file:///srv/mlruns"
            )
        if url.startswith("file:"):
            # MLflow 3 wants to hear that a folder is meant, since it has databases as well.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow

        self._mlflow = mlflow
        self._settings, self._tracked = settings, tracked
        self._client = mlflow.MlflowClient(tracking_uri=url)
        known_id = tracked.known_id(SinkName.MLFLOW)
        if known_id is None:
            self._run_id = tracked.keep_id(SinkName.MLFLOW, self._create(settings, tracked))
        else:
            self._run_id = known_id
            self._client.set_terminated(known_id, "RUNNING")
        self._points: dict[str, set[tuple[int, int]]] = {}
        """Step and Unix time in ms of every point that the service has, by name; see `_sent`."""
        self._sent_steps = {step for step, _ in self._sent_points(LAST_NAME)}

    def sent_steps(self) -> Collection[int]:
        """Return the steps whose last number the service has."""
        return frozenset(self._sent_steps)

    def step(self, record: StepRecord) -> None:
        """Send the numbers of a step that was not sent before."""
        if record.step not in self._sent_steps:
            self._sent_steps.add(record.step)
            self._log(step_scalars(record), record.step, record.time_unix_s)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Send the result at the step at which the evaluation started."""
        self._log_once(evaluation_scalars(record), record.step, record.time_unix_s)
        if rows := table_rows(self._settings, self._tracked, record.step):
            name = f"{TITLE}/step-{record.step:08d}.md"
            self._client.log_text(self._run_id, table_page(rows), name)

    def event(self, record: EventRecord, step: int) -> None:
        """Send a mark at the step, and the last event of each kind as a tag."""
        name = f"events/{record.kind}"
        self._log_once({name: 1.0}, step, record.time_unix_s)
        self._client.set_tag(self._run_id, name, record.message)

    def close(self, *, failed: bool) -> None:
        """End the run; everything was sent."""
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def _create(self, settings: SinkSettings, tracked: TrackedRun) -> str:
        name = settings.project or DEFAULT_PROJECT
        experiment = self._client.get_experiment_by_name(name)
        try:
            experiment_id = (
                self._client.create_experiment(name)
                if experiment is None
                else experiment.experiment_id
            )
        except self._mlflow.MlflowException:  # another run has created it in the meantime
            experiment_id = self._client.get_experiment_by_name(name).experiment_id
        run_id: str = self._client.create_run(experiment_id, run_name=tracked.title).info.run_id
        self._client.log_batch(
            run_id,
            params=[self._mlflow.entities.Param(name, text) for name, text in _parameters(tracked)],
        )
        return run_id

    def _sent_points(self, name: str) -> set[tuple[int, int]]:
        """Return the points that the service has under a name; it is asked once."""
        if name not in self._points:
            history = self._client.get_metric_history(self._run_id, name)
            self._points[name] = {(point.step, point.timestamp) for point in history}
        return self._points[name]

    def _log_once(self, values: Mapping[str, float], step: int, time_unix_s: float) -> None:
        """Send what the service does not have of these values."""
        point = (step, _milliseconds(time_unix_s))
        new = {
            name: value for name, value in values.items() if point not in self._sent_points(name)
        }
        for name in new:
            self._sent_points(name).add(point)
        if new:
            self._log(new, step, time_unix_s)

    def _log(self, values: Mapping[str, float], step: int, time_unix_s: float) -> None:
        at_ms = _milliseconds(time_unix_s)
        metric = self._mlflow.entities.Metric
        metrics = [metric(name, value, at_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)


def _milliseconds(time_unix_s: float) -> int:
    return int(time_unix_s * 1000)


def _parameters(tracked: TrackedRun) -> Iterator[tuple[str, str]]:
    """Yield name and value of each setting, by `section.field`."""
    for section, fields in tracked.settings.items():
        named = fields if isinstance(fields, dict) else {"": fields}
        for field, value in named.items():
            name = f"{section}.{field}".removesuffix(".")
            text = value if isinstance(value, str) else json.dumps(value)
            yield name, text[:_MAX_PARAMETER_CHARACTERS]
