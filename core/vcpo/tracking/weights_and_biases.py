"""Weights & Biases, by its own client."""

import uuid
from collections.abc import Collection
from typing import Any

from vcpo.api.tracking import Sink as SinkSettings
from vcpo.api.tracking import SinkName, WandbMode
from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.records.step_record import StepRecord
from vcpo.tracking.sink import (
    COLUMNS,
    DEFAULT_PROJECT,
    TITLE,
    TrackedRun,
    evaluation_scalars,
    step_scalars,
    table_rows,
)

_FINISH_S = 10.0
_EVALUATION_STEP = "evaluation/step"


class WandbSink:
    """One run of a project, continued under the same id after a restart.

    The service takes steps in rising order only. So steps that a restarted learner takes again are
    not sent: the service keeps those of the first time. Offline the files of a process hold the
    whole history, since nobody knows which of the files before are whole and will be sent.
    """

    def __init__(self, settings: SinkSettings, tracked: TrackedRun) -> None:
        import wandb

        run_id = tracked.known(SinkName.WANDB) or tracked.keep(SinkName.WANDB, uuid.uuid4().hex)
        is_offline = settings.mode is WandbMode.OFFLINE
        self._wandb = wandb
        self._settings, self._tracked = settings, tracked
        self._run = wandb.init(
            id=run_id,
            name=tracked.title,
            project=settings.project or DEFAULT_PROJECT,
            entity=settings.entity,
            config=tracked.settings,
            dir=tracked.run_dir,
            mode="offline" if is_offline else "online",
            resume=None if is_offline else "allow",
            settings=wandb.Settings(
                **({} if settings.url is None else {"base_url": settings.url}),
                console="off",  # the log is the process's own
                silent=True,
                disable_code=True,
                disable_git=True,
                finish_timeout=_FINISH_S,
                x_disable_stats=True,
            ),
        )
        self._run.define_metric(_EVALUATION_STEP, hidden=True)
        self._run.define_metric("evaluation/*", step_metric=_EVALUATION_STEP)
        self._first_row = max(self._run.step, 0)
        """First row that the service takes; offline nothing is known of rows before."""
        self._row = 0
        """Row that is being filled, the number of its step; 0 before the first step."""
        self._early: dict[str, Any] = {}
        """Values that came before a step in this process. A row of them alone would look like a
        step that the service has, so they wait for the next one."""

    def sent_steps(self) -> Collection[int]:
        return range(1, self._first_row)

    def step(self, record: StepRecord) -> None:
        if record.step >= self._first_row and record.step > self._row:
            self._row = record.step
            values = {**step_scalars(record), "_timestamp": record.time_unix_s}
            self._run.log({**self._early, **values}, step=self._row)
            self._early.clear()

    def evaluation(self, record: EvaluationRecord) -> None:
        values = {**evaluation_scalars(record), _EVALUATION_STEP: record.step}
        if rows := table_rows(self._settings, self._tracked, record.step):
            values[TITLE] = self._wandb.Table(columns=list(COLUMNS), data=rows)
        self._fill(values)

    def event(self, record: EventRecord, step: int) -> None:
        self._fill({f"events/{record.kind}": 1})
        self._run.summary[f"last_event/{record.kind}"] = record.message

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._wandb.teardown()  # only this waits until the client has written its file

    def _fill(self, values: dict[str, Any]) -> None:
        if self._row or not self._first_row:
            self._run.log(values, step=self._row)
        else:
            self._early |= values
