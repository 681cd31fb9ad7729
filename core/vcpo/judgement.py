"""What is the matter with a run, and what to do about it: one table for everybody who asks.

The panel and the exit status of `vcpo run`, the report, the learner's last event and the run's
status in a cluster read it. A row judges the signals of a run and, where the caller has read them,
its records. Rows are in order of urgency: the first that holds is the run's verdict.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Final

from vcpo.algo.health.collapse import Collapse, find_collapse, share_error
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.api import VCPORunSpec
from vcpo.control.limits import STARVED_IDLE_RATIO
from vcpo.control.signals import RunSignals
from vcpo.records.journal import TURNS, EventRecord, Metrics, failure_of
from vcpo.records.reasons import DropReason, SkipReason
from vcpo.records.step_record import StepRecord

NOTICE_AFTER_STEPS: Final = 10
"""Steps in a row without an update from which they matter; one or two happen in any run."""
_FAILURES: Final = 3
"""Failed generations in a row from which they matter."""
_FAILED_RATIO: Final = 0.02
"""Share of failed responses from which what is left is a biased sample."""
_BACKOFF: Final = 0.25
_MANY_CUT: Final = 0.5
_HELD_SCALE: Final = 0.25
_HELD_STEPS: Final = 32
_NO_RECORDS: Final = Metrics(steps=(), evaluations=())
_SMALLER: Final = "a smaller optimizer.learningRate or algorithm.maxPolicyLagSteps"


class Grade(StrEnum):
    """How well something is."""

    GOOD = "good"
    NOTICE = "notice"
    """Worth knowing, but the run handles it."""
    BAD = "bad"
    """A guarantee was broken, or the model does not learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a run is judged by."""

    spec: VCPORunSpec
    signals: RunSignals
    phase: str
    """`starting`, `restarting` or `silent`, a word of `recorded_phase`, or what the learner
    reports."""
    metrics: Metrics = _NO_RECORDS
    """Records of the run; empty where the caller has only signals."""

    @property
    def is_over(self) -> bool:
        return self.phase in {"failed", "collapsed", "no update", "complete", "interrupted"}

    @property
    def level(self) -> WarningLevel:
        return self.signals.warning_level or WarningLevel.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One matter of a run."""

    name: str
    grade: Grade
    why: str
    """What is the matter, in sentences."""
    todo: str = ""
    """What a person does about it, in a sentence; empty: nothing."""

    def __str__(self) -> str:
        return f"{self.why} {self.todo}".rstrip()


def judgements(run: Evidence) -> tuple[Judgement, ...]:
    """Return what is the matter with a run, at least one; the first is its verdict."""
    found = []
    for name, grade, find, todo in _TABLE:
        if why := find(run):
            fix = todo if isinstance(todo, str) else todo(run)
            is_path = not why.split()[0].isalpha()  # of a field
            sentence = f"{why[:1] if is_path else why[:1].upper()}{why[1:].rstrip('.')}."
            found.append(Judgement(name=name, grade=grade, why=sentence, todo=fix))
    well = Judgement(name="well", grade=Grade.GOOD, why="The run trains as it should.")
    return tuple(found) or (well,)


def recorded_phase(
    spec: VCPORunSpec,
    metrics: Metrics,
    events: Sequence[EventRecord] = (),
    *,
    is_at_work: bool = True,
) -> str:
    """Return how far a run is by its records, in a word or two.

    is_at_work: whether a host or a learner holds its directory.
    """
    if failure_of(events) is not None:
        return "failed"
    last = next((event.kind for event in reversed(events) if event.kind in TURNS), None)
    taken = metrics.steps[-1].step if metrics.steps else 0
    if taken and taken >= spec.steps and last in {"Complete", "Collapsed", None}:
        return ended_phase(metrics)
    if not is_at_work:
        return "interrupted"
    return "running" if taken else "starting"


def ended_phase(metrics: Metrics) -> str:
    """Return how a run ended that took all its steps.

    `no update`: every step was skipped, so the model is unchanged. `collapsed`: the run ends far
    below its best; a model that no step changed has not collapsed, for its rewards move by chance.
    """
    if num_skipped_at_end(metrics.steps) == len(metrics.steps) > 0:
        return "no update"
    found = run_collapse(metrics)
    return "complete" if found is None or found.fall.has_recovered else "collapsed"


class Measure(StrEnum):
    """What collapsed."""

    ACCURACY = "held-out reward"
    REWARD = "mean training reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCollapse:
    """The collapse of a run."""

    measure: Measure
    fall: Collapse
    warned_step: int | None
    """First step at which the early warning was critical or dead; None when it never was."""

    def __str__(self) -> str:
        fall, warned = self.fall, "never was critical"
        if self.warned_step is not None:
            warned = f"was critical from step {self.warned_step:,}"
        how = "collapsed, and recovered" if fall.has_recovered else "collapsed"
        return (
            f"The run {how}: the {self.measure} fell from {fall.best:.3g} at step"
            f" {fall.best_step:,} to {fall.value:.3g} at step {fall.step:,}, and ends at"
            f" {fall.last:.3g}. The early warning {warned}."
        )


def run_collapse(metrics: Metrics) -> RunCollapse | None:
    """Return the collapse of a run, or None; one that lasts comes before one that was overcome.

    Windows of steps are judged as the learner's guards did, under the step that ends each.
    """
    accuracies = [(each.step, each.accuracy) for each in metrics.evaluations]
    num_prompts = max(1, min((each.num_prompts for each in metrics.evaluations), default=1))
    windows = [
        (step.step, step.reward_window_mean, step.reward_window_error)
        for step in metrics.steps
        if step.reward_window_mean is not None
    ]
    found = {
        Measure.ACCURACY: find_collapse(
            accuracies, errors=[share_error(one, num_prompts) for _, one in accuracies]
        ),
        Measure.REWARD: find_collapse(
            [(step, mean) for step, mean, _ in windows], errors=[error for _, _, error in windows]
        ),
    }
    falls = [(measure, fall) for measure, fall in found.items() if fall is not None]
    if not falls:
        return None
    measure, fall = min(falls, key=lambda each: (each[1].has_recovered, each[1].step))
    warned = next((step.step for step in metrics.steps if is_critical(step)), None)
    return RunCollapse(measure=measure, fall=fall, warned_step=warned)


def lasting_collapse(metrics: Metrics) -> str:
    """Return how a run that took all its steps collapsed, with the fix; empty if it did not."""
    if ended_phase(metrics) != "collapsed":
        return ""
    return f"{run_collapse(metrics)} Fix: {_SMALLER}, from a checkpoint before the collapse."


def is_critical(step: StepRecord) -> bool:
    """Return whether the early warning is critical or dead after a step."""
    return step.warning_level in (WarningLevel.CRITICAL, WarningLevel.DEAD)


_SKIPS: Final[dict[str, tuple[str, str]]] = {
    SkipReason.NO_GRADIENT: (
        "all rewards of every prompt are equal: it is solved, or there is nothing to learn",
        "a reward that distinguishes responses, or a larger batch.trajectoriesPerPrompt",
    ),
    SkipReason.LOW_ESS: (
        "the ESS ratio is too small a share of the on-policy ratio",
        "a smaller algorithm.maxPolicyLagSteps, optimizer.learningRate or algorithm.refuseBelow",
    ),
    SkipReason.NON_FINITE_WEIGHT: (
        "an importance weight is not a number",
        "the same precision for rollout and learner, or a smaller algorithm.maxPolicyLagSteps",
    ),
    SkipReason.NON_FINITE_GRADIENT: (
        "the gradient is not a number",
        "learner.precision float32, or a smaller optimizer.learningRate",
    ),
}
"""Why steps are skipped, and the fix, by `StepRecord.skipped`."""


def skip_cause(reason: str) -> str:
    """Return why a step was skipped, in words; reason: `StepRecord.skipped`."""
    return _SKIPS.get(reason, (reason, ""))[0]


def no_update_notice(num_skipped: int, reason: str, *, is_all: bool = False) -> str:
    """Return a notice about skipped steps in a row, with the fix; empty while they are few.

    is_all: whether they are all steps of the run.
    """
    if num_skipped < NOTICE_AFTER_STEPS and not is_all:
        return ""
    cause, fix = _SKIPS.get(reason, (reason, ""))
    what = f"The last {num_skipped} steps made no update"
    if is_all:
        what = f"No step made an update ({num_skipped} of {num_skipped} were skipped)"
    return f"{what}: {cause}.{fix and f' Fix: {fix}.'}"


def unmoved(signals: RunSignals, total_steps: int) -> str:
    """Return a notice about the last steps without an update; empty while they are few."""
    if (last := signals.last) is None:
        return ""
    reason = last.skipped or "the learner's log says why"
    is_all = signals.has_never_updated(total_steps)
    return no_update_notice(last.skipped_steps, reason, is_all=is_all)


def num_skipped_at_end(steps: Sequence[StepRecord]) -> int:
    """Return how many of the last steps in a row were skipped."""
    taken = (at for at, step in enumerate(reversed(steps)) if step.skipped is None)
    return next(taken, len(steps))


def _failure(run: Evidence) -> str:
    return run.signals.failure or ("the run failed" if run.phase == "failed" else "")


def _collapse(run: Evidence) -> str:
    told = run.signals.collapse
    if run.phase == "collapsed":
        return told or lasting_collapse(run.metrics) or "the run ended with a collapsed reward"
    return told


def _recovery(run: Evidence) -> str:
    found = None if run.phase == "collapsed" else run_collapse(run.metrics)
    return "" if found is None else str(found)


def _no_update(run: Evidence) -> str:
    steps = run.metrics.steps
    number = num_skipped_at_end(steps)
    if number:
        return no_update_notice(number, steps[-1].skipped or "", is_all=number == len(steps))
    if told := unmoved(run.signals, run.spec.steps):
        return told
    return "no step made an update: the model is unchanged" if run.phase == "no update" else ""


def _broken_lag(run: Evidence) -> str:
    limit = run.spec.algorithm.max_policy_lag_steps
    lags = [step.lag_max for step in run.metrics.steps] or [
        run.signals.last.lag_max if run.signals.last else 0
    ]
    broken = [lag for lag in lags if lag > limit]
    if not broken:
        return ""
    return (
        f"{_steps(len(broken))} trained on tokens up to {max(broken)} versions old; the lag limit"
        f" is {limit}"
    )


def _imbalance(run: Evidence) -> str:
    for step in run.metrics.steps:
        known = step.in_flight + step.buffered + step.consumed + sum(step.dropped.values())
        if step.leased != known:
            return (
                f"trajectories do not add up since step {step.step:,}: leased minus in flight,"
                f" buffered, consumed and dropped is {step.leased - known}, not 0"
            )
    return ""


def _warning_cure(run: Evidence) -> str:
    if run.is_over:
        return f"Begin anew with {_SMALLER}."
    if run.spec.health.guards.answers(run.level):
        return "Wait ten steps: the run slows down by itself."
    return "Halve algorithm.maxPolicyLagSteps: spec.health forbids the run to slow down."


def _generation_failures(run: Evidence) -> str:
    signals = run.signals
    if signals.failures_in_a_row < _FAILURES or not signals.generation_failure:
        return ""
    return f"the last generations failed: {signals.generation_failure}"


def _left_out(run: Evidence) -> str:
    last = run.metrics.steps[-1] if run.metrics.steps else run.signals.last
    failed = 0 if last is None else last.dropped.get(DropReason.GENERATION_FAILED, 0)
    one_group = run.spec.batch.trajectories_per_prompt
    if last is None or failed <= max(_FAILED_RATIO * last.leased, one_group):
        return ""
    latest = run.signals.generation_failure
    told = f"; last: {latest}" if latest else ""
    return (
        f"{failed:,} of {last.leased:,} responses failed and were left out with their groups{told}"
    )


def _rollbacks(run: Evidence) -> str:
    back = [step for step in run.metrics.steps if step.rollbacks]
    if not back:
        return run.signals.rollback
    times = "once" if back[-1].rollbacks == 1 else f"{back[-1].rollbacks} times"
    return f"the run went back to a good checkpoint {times}, first at step {back[0].step:,}"


def _warnings(run: Evidence) -> str:
    if run.level is WarningLevel.WARN:
        return "the early warning warns: the data is off policy"
    alarms = [step for step in run.metrics.steps if step.warning_level != WarningLevel.OK]
    if not alarms or run.level is not WarningLevel.OK:
        return ""
    worst = "was critical" if any(map(is_critical, alarms)) else "warned"
    return f"the early warning {worst} at {_steps(len(alarms))}, first at step {alarms[0].step:,}"


def _low_ess(run: Evidence) -> str:
    floor = run.spec.control.ess_floor_ratio
    below = [
        step
        for step in run.metrics.steps
        if step.relative_ess_ratio is not None and step.relative_ess_ratio < floor
    ]
    if not below:
        return ""
    return f"{_steps(len(below))} had an ESS ratio below {floor:.0%} of the on-policy one"


def _skips(run: Evidence) -> str:
    reasons = Counter(step.skipped for step in run.metrics.steps if step.skipped is not None)
    if not reasons or _no_update(run):
        return ""
    listed = "; ".join(f"{skip_cause(reason)} ({count})" for reason, count in reasons.most_common())
    return f"{_steps(reasons.total())} made no update: {listed}"


def _cut(run: Evidence) -> str:
    cut = run.signals.last.cut_responses_ratio if run.signals.last else 0.0
    return f"{cut:.0%} of the last step's responses were cut" if cut >= _MANY_CUT else ""


def _held_rate(run: Evidence) -> str:
    held = [*takewhile(_is_held_low, reversed(run.metrics.steps))]
    scale = max((step.learning_rate_scale for step in held), default=0.0)
    means = [
        (mean, step.reward_window_error)
        for step in held
        if (mean := step.reward_window_mean) is not None
    ]
    if run.spec.algorithm.trust_region is None or len(held) < _HELD_STEPS or not (scale and means):
        return ""
    (late, late_error), (early, early_error) = means[0], means[-1]
    is_rising = late - early > 2 * math.hypot(late_error, early_error)
    why = f"the rate is held at 1/{1 / scale:.0f} for {_steps(len(held))} while the reward rises"
    return why if is_rising else ""


def _is_held_low(step: StepRecord) -> bool:
    return step.learning_rate_scale <= _HELD_SCALE and step.warning_level == WarningLevel.OK


def _idleness(run: Evidence) -> str:
    idle_s = sum(step.idle_s for step in run.metrics.steps)
    total_s = idle_s + sum(step.step_s for step in run.metrics.steps)
    share = idle_s / total_s if total_s > 0 else run.signals.learner_idle_ratio
    return "the learner waits for data" if share > STARVED_IDLE_RATIO else ""


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _when(holds: Callable[[Evidence], bool], why: str) -> Callable[[Evidence], str]:
    return lambda run: why if holds(run) else ""


def _at(phase: str, why: str) -> Callable[[Evidence], str]:
    return _when(lambda run: run.phase == phase, why)


_Row = tuple[str, Grade, Callable[[Evidence], str], str | Callable[[Evidence], str]]
_TABLE: Final[tuple[_Row, ...]] = (
    ("failed", Grade.BAD, _failure, "Fix this, then resume the run."),
    ("collapsed", Grade.BAD, _collapse, ""),
    ("no update", Grade.BAD, _no_update, "See its prompts and rewards."),
    ("complete", Grade.GOOD, _at("complete", "the run is complete"), ""),
    (
        "interrupted",
        Grade.NOTICE,
        _at("interrupted", "the run was interrupted before its end"),
        "It can be resumed.",
    ),
    (
        "silent",
        Grade.BAD,
        _at("silent", "the learner does not answer, so lag limit and workers stay as they are"),
        "See the learner's log.",
    ),
    (
        "starting",
        Grade.NOTICE,
        _when(
            lambda run: run.phase in {"starting", "restarting"},
            "starting: the learner is loading the model",
        ),
        "",
    ),
    ("recovered", Grade.BAD, _recovery, ""),
    ("lag", Grade.BAD, _broken_lag, ""),
    ("accounts", Grade.BAD, _imbalance, ""),
    (
        "dead",
        Grade.BAD,
        _when(
            lambda run: run.level is WarningLevel.DEAD,
            "the steps change nothing, or one trajectory decides them",
        ),
        "Stop the run, unless its task is solved.",
    ),
    (
        "critical",
        Grade.BAD,
        _when(
            lambda run: run.level is WarningLevel.CRITICAL,
            "the early warning is critical: few trajectories make the updates",
        ),
        _warning_cure,
    ),
    ("generations", Grade.BAD, _generation_failures, "Fix what the message says."),
    ("left out", Grade.BAD, _left_out, "Fix the cause: the groups left are a biased sample."),
    ("rollback", Grade.NOTICE, _rollbacks, ""),
    ("warning", Grade.NOTICE, _warnings, ""),
    ("mismatch", Grade.NOTICE, lambda run: run.signals.mismatch, ""),
    ("set aside", Grade.NOTICE, lambda run: run.signals.set_aside, ""),
    (
        "backoff",
        Grade.NOTICE,
        _when(
            lambda run: (
                run.signals.last is not None and run.signals.last.learning_rate_backoff <= _BACKOFF
            ),
            "warnings and rollbacks have left a quarter of the learning rate or less",
        ),
        "If it stays so, begin anew with a third of optimizer.learningRate.",
    ),
    (
        "throttled",
        Grade.NOTICE,
        _when(
            lambda run: run.signals.lag_limit_steps < run.spec.algorithm.max_policy_lag_steps,
            "the run is throttled: it trains on younger data",
        ),
        "",
    ),
    ("ess", Grade.NOTICE, _low_ess, ""),
    ("skips", Grade.NOTICE, _skips, ""),
    ("cut", Grade.NOTICE, _cut, "Raise sampling.maxNewTokens, or reward short responses."),
    (
        "held rate",
        Grade.NOTICE,
        _held_rate,
        "If it learns at the whole rate without lag, try `algorithm.method: vcpo`; else lower it.",
    ),
    ("idle", Grade.NOTICE, _idleness, "More or faster workers would help."),
)
"""Name, grade, why it holds (empty if it does not), and what to do."""
