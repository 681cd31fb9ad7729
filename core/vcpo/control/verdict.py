"""What is the matter with a run, how far it is, and what to do: one answer for everybody who asks.

The panel of `vcpo run`, the report and the run's status in a cluster show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, pstdev

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.api import VCPORunSpec
from vcpo.control.limits import STARVED_IDLE_RATIO
from vcpo.control.signals import RunSignals

_FAILURES_NOTICED = 3
"""Failed generations in a row from which they are the matter."""
_BACKOFF_NOTICED = 0.25
_TREND_ERRORS = 2.0
"""Standard errors by which a reward must change to rise or to fall."""


class Grade(StrEnum):
    """How well something is."""

    GOOD = "good"
    NOTICE = "notice"
    """Worth knowing, but the run handles it."""
    BAD = "bad"
    """A guarantee was broken, or the model does not learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The most urgent matter of a run."""

    grade: Grade
    why: str
    """What is the matter, in a sentence; it holds no number that changes with every step."""
    todo: str = ""
    """What a person does about it, in a sentence; empty: nothing."""

    def __str__(self) -> str:
        """Return both sentences."""
        return f"{self.why} {self.todo}".rstrip()


def verdict(spec: VCPORunSpec, signals: RunSignals, *, phase: str) -> Verdict:
    """Return the most urgent matter of a run.

    phase: `starting`, `restarting` or `silent`, how the run ended (`complete`, `collapsed`,
        `no update`, `failed`, `stopped`), or what the learner reports.
    """
    return next(_matters(spec, signals, phase))


def facts(
    spec: VCPORunSpec,
    signals: RunSignals,
    *,
    eta_s: float | None = None,
    workers_desired: int = 0,
    rewards: Sequence[float] = (),
    checkpoint_step: int | None = None,
) -> str:
    """Return how far a run is in one line; what is not known is left out.

    eta_s: estimated seconds to the last step.
    rewards: mean rewards of the last steps, oldest first, from which the trend is read.
    checkpoint_step: step of the newest checkpoint.
    """
    relative, rate = signals.relative_ess_ratio, signals.effective_rate
    reward = signals.reward_mean
    lag = "-" if signals.lag_max is None else signals.lag_max
    busy = sum(each.in_flight > 0 for each in signals.workers.values())
    bound = spec.algorithm.max_policy_lag_steps
    told = (
        f"step {signals.step}/{spec.steps}" + ("" if eta_s is None else f", {_ago(eta_s)} to go"),
        None if reward is None else f"reward {reward:.3f}{trend(rewards)}",
        None if relative is None else f"ESS {relative:.0%} of on-policy",
        None if rate is None else f"rate {rate}",
        f"lag {lag}, limit {signals.lag_limit_steps} of {bound}",
        f"workers busy {busy} of {workers_desired}" if workers_desired else None,
        None if checkpoint_step is None else f"checkpoint at step {checkpoint_step}",
    )
    return " · ".join(each for each in told if each is not None)


def trend(rewards: Sequence[float]) -> str:
    """Return `, rising`, `, falling` or `, level`: the later half against the earlier one.

    Empty for less than eight steps. A change within two standard errors is none.
    """
    half = len(rewards) // 2
    if half < 4:
        return ""
    before, after = rewards[:half], rewards[-half:]
    error = math.hypot(pstdev(before), pstdev(after)) / math.sqrt(half)
    change = fmean(after) - fmean(before)
    if abs(change) <= _TREND_ERRORS * error:
        return ", level"
    return ", rising" if change > 0 else ", falling"


def _matters(spec: VCPORunSpec, signals: RunSignals, phase: str) -> Iterator[Verdict]:
    """Yield what is the matter, the most urgent first; the last one always holds."""
    yield from _ends(signals, phase)
    yield from _silences(phase)
    if signals.collapse:
        yield Verdict(grade=Grade.BAD, why=_sentence(signals.collapse))
    if signals.has_never_updated or signals.no_update:
        why = signals.no_update or "no step of the run made an update"
        yield Verdict(grade=Grade.BAD, why=_sentence(why), todo="See its prompts and rewards.")
    yield from _dangers(spec, signals)
    if signals.failures_in_a_row >= _FAILURES_NOTICED and signals.latest_generation_failure:
        why = f"the last generations failed: {signals.latest_generation_failure}"
        yield Verdict(grade=Grade.BAD, why=_sentence(why), todo="Repair what the message names.")
    for notice in filter(None, (signals.mismatch, signals.set_aside)):
        yield Verdict(grade=Grade.NOTICE, why=_sentence(notice))
    if (signals.learning_rate_backoff or 1.0) <= _BACKOFF_NOTICED:
        yield Verdict(
            grade=Grade.NOTICE,
            why="Warnings and rollbacks have left a quarter of the learning rate or less.",
            todo="If it stays so, begin anew with a third of optimizer.learningRate.",
        )
    if signals.lag_limit_steps < spec.algorithm.max_policy_lag_steps:
        yield Verdict(grade=Grade.NOTICE, why="The run is throttled: it trains on younger data.")
    if signals.learner_idle_ratio > STARVED_IDLE_RATIO:
        yield Verdict(
            grade=Grade.NOTICE,
            why="The learner waits for data.",
            todo="More or faster workers would help.",
        )
    yield Verdict(grade=Grade.GOOD, why="The run trains as it should.")


def _ends(signals: RunSignals, phase: str) -> Iterator[Verdict]:
    if phase == "failed" or signals.failure:
        why = _sentence(signals.failure or "the run failed")
        yield Verdict(grade=Grade.BAD, why=why, todo="Remove the cause and resume it.")
    elif phase == "collapsed":
        yield Verdict(
            grade=Grade.BAD,
            why="The run ended with a collapsed reward.",
            todo="Take the best checkpoint, and begin anew with a third of optimizer.learningRate.",
        )
    elif phase == "no update":
        yield Verdict(grade=Grade.BAD, why="No step made an update: the model is unchanged.")
    elif phase == "complete" and not signals.collapse:
        yield Verdict(grade=Grade.GOOD, why="The run is complete.")
    elif phase == "stopped":
        yield Verdict(grade=Grade.NOTICE, why="The run was stopped.", todo="It can be resumed.")


def _silences(phase: str) -> Iterator[Verdict]:
    if phase == "silent":
        yield Verdict(
            grade=Grade.BAD,
            why="The learner does not answer: nobody steers the run.",
            todo="See the learner's log.",
        )
    elif phase in {"starting", "restarting"}:
        yield Verdict(grade=Grade.NOTICE, why="The learner starts and loads its model.")


def _dangers(spec: VCPORunSpec, signals: RunSignals) -> Iterator[Verdict]:
    level = signals.warning_level or WarningLevel.OK
    if level is WarningLevel.DEAD:
        yield Verdict(
            grade=Grade.BAD,
            why="The steps change nothing, or one trajectory decides them.",
            todo="Stop the run, unless its task is solved.",
        )
    elif level is WarningLevel.CRITICAL:
        acts = spec.health.guards.answers(level)
        yield Verdict(
            grade=Grade.BAD,
            why="The early warning is critical: few trajectories make the updates.",
            todo="Wait ten steps: the run slows down by itself."
            if acts
            else "Halve algorithm.maxPolicyLagSteps: spec.health forbids the run to slow down.",
        )
    if signals.rollback:
        yield Verdict(grade=Grade.NOTICE, why=_sentence(signals.rollback))
    if level is WarningLevel.WARN:
        yield Verdict(grade=Grade.NOTICE, why="The early warning warns: the data is off policy.")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _ago(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}h {minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m"
