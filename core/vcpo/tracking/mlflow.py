"""MLflow, by its client; the server may be a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping

from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.records.step_record import StepRecord
from vcpo.spec.tracking import Sink as SinkSettings
from vcpo.spec.tracking import SinkName
from vcpo.tracking.scalars import STEP_NAME, evaluation_scalars, step_scalars
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
        self._client = mlflow.MlflowClient(tracking_uri=url)
        known_id = tracked.known_id(SinkName.MLFLOW)
        if known_id is None:
            self._run_id = tracked.keep_id(SinkName.MLFLOW, self._create(settings, tracked))
        else:
            self._run_id = known_id
            self._client.set_terminated(known_id, "RUNNING")
        sent = self._client.get_run(self._run_id).data.metrics
        self._sent_step = int(sent.get(STEP_NAME, 0))
        self._is_copy = tracked.is_copy

    def step(self, record: StepRecord) -> None:
        """Send the numbers of a step that was not sent before."""
        if record.step > self._sent_step:
            self._log(step_scalars(record), record.step, record.time_unix_s)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Send the result at the step at which the evaluation started."""
        if record.step > self._sent_step or self._sent_step == 0:
            self._log(evaluation_scalars(record), record.step, record.time_unix_s)

    def event(self, record: EventRecord, step: int) -> None:
        """Send a mark at the step, and the last event of each kind as a tag."""
        if step > self._sent_step or not (self._is_copy and self._sent_step):
            name = f"events/{record.kind}"
            self._log({name: 1.0}, step, record.time_unix_s)
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

    def _log(self, values: Mapping[str, float], step: int, time_unix_s: float) -> None:
        at_ms = int(time_unix_s * 1000)
        metric = self._mlflow.entities.Metric
        metrics = [metric(name, value, at_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)


def _parameters(tracked: TrackedRun) -> Iterator[tuple[str, str]]:
    """Yield name and value of each setting, by `section.field`."""
    for section, fields in tracked.settings.items():
        named = fields if isinstance(fields, dict) else {"": fields}
        for field, value in named.items():
            name = f"{section}.{field}".removesuffix(".")
            text = value if isinstance(value, str) else json.dumps(value)
            yield name, text[:_MAX_PARAMETER_CHARACTERS]
