"""Weights & Biases, by its own client."""

from __future__ import annotations

from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.records.step_record import StepRecord
from vcpo.spec.tracking import Sink as SinkSettings
from vcpo.spec.tracking import SinkName, WandbMode
from vcpo.tracking.scalars import evaluation_scalars, step_scalars
from vcpo.tracking.sink import DEFAULT_PROJECT, TrackedRun, new_id

_FINISH_S = 10.0
_EVALUATION_STEP = "evaluation/step"


class WandbSink:
    """One run of a project, continued under the same id after a restart.

    The service takes steps in rising order only. So steps that a restarted learner takes again are
    not sent: the service keeps those of the first time.
    """

    def __init__(self, settings: SinkSettings, tracked: TrackedRun) -> None:
        import wandb

        run_id = tracked.known_id(SinkName.WANDB) or tracked.keep_id(SinkName.WANDB, new_id())
        is_offline = settings.mode is WandbMode.OFFLINE
        self._wandb = wandb
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
        self._is_copy = tracked.is_copy
        self._sent_step = max(tracked.furthest_step, self._run.step - 1, 0)
        self._step = self._run.step if self._sent_step == 0 else self._sent_step + 1
        """Step of the service's row that is being filled; it never falls."""

    def step(self, record: StepRecord) -> None:
        """Send the numbers of a step that was not sent before."""
        if record.step > self._sent_step:
            self._step = record.step
            values = {**step_scalars(record), "_timestamp": record.time_unix_s}
            self._run.log(values, step=record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Send the result against the step at which the evaluation started."""
        if record.step > self._sent_step or self._sent_step == 0:
            values = {**evaluation_scalars(record), _EVALUATION_STEP: record.step}
            self._run.log(values, step=self._step)

    def event(self, record: EventRecord, step: int) -> None:
        """Send a mark at the step, and the last event of each kind as text."""
        if step > self._sent_step or not (self._is_copy and self._sent_step):
            self._run.log({f"events/{record.kind}": 1}, step=self._step)
            self._run.summary[f"last_event/{record.kind}"] = record.message

    def close(self, *, failed: bool) -> None:
        """Wait for the upload, up to ten seconds, and end the run."""
        self._run.finish(exit_code=int(failed))
        self._wandb.teardown()  # only this waits until the client has written its file
