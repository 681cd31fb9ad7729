"""The verdict on a run: the most urgent matter, what to do, and how far the run is."""

from __future__ import annotations

import pytest

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.api import parse_run
from vcpo.control.signals import RunSignals, WorkerSignals
from vcpo.control.verdict import Grade, facts, trend, verdict

RUN = parse_run("""
metadata: {name: r}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 300
  algorithm: {maxPolicyLagSteps: 8}
""")
QUIET = RUN.spec.model_copy(
    update={"health": RUN.spec.health.model_copy(update={"enabled": False})}
)


def signals(**changes) -> RunSignals:
    values = {"step": 120, "policy_version": 120, "batch_trajectories": 16, "lag_limit_steps": 8}
    return RunSignals(**{**values, **changes})


def judged(phase="running", spec=RUN.spec, **changes):
    return verdict(spec, signals(**changes), phase=phase)


def test_a_run_that_trains_is_good_and_asks_for_nothing():
    found = judged(warning_level=WarningLevel.OK)
    assert (found.grade, found.why, found.todo) == (Grade.GOOD, "The run trains as it should.", "")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"phase": "failed", "failure": "out of memory"}, "Out of memory."),
        ({"phase": "collapsed"}, "The run ended with a collapsed reward."),
        ({"phase": "silent"}, "The learner does not answer: nobody steers the run."),
        ({"phase": "starting"}, "The learner starts and loads its model."),
        ({"no_update": "the last 12 steps made no update"}, "The last 12 steps made no update."),
        (
            {"warning_level": WarningLevel.CRITICAL},
            "The early warning is critical: few trajectories make the updates.",
        ),
        (
            {"failures_in_a_row": 3, "latest_generation_failure": "reward: 503"},
            "The last generations failed: reward: 503.",
        ),
        (
            {"learning_rate_backoff": 0.25},
            "Warnings and rollbacks have left a quarter of the learning rate or less.",
        ),
        ({"lag_limit_steps": 4}, "The run is throttled: it trains on younger data."),
        ({"learner_idle_ratio": 0.9}, "The learner waits for data."),
        ({"phase": "complete"}, "The run is complete."),
    ],
)
def test_each_matter_has_its_sentence(changes, why):
    assert judged(**changes).why == why


def test_the_most_urgent_matter_comes_first():
    several = {"warning_level": WarningLevel.CRITICAL, "lag_limit_steps": 0}
    assert judged(**several).grade is Grade.BAD
    assert judged(phase="silent", **several).why.startswith("The learner does not answer")


def test_what_to_do_about_a_critical_run_depends_on_its_guards():
    critical = {"warning_level": WarningLevel.CRITICAL}
    assert judged(**critical).todo == "Wait ten steps: the run slows down by itself."
    assert judged(spec=QUIET, **critical).todo.startswith("Halve algorithm.maxPolicyLagSteps")


def test_the_facts_are_one_line_without_what_is_not_known():
    known = signals(
        reward_mean=0.43,
        ess_ratio=0.4,
        on_policy_ess_ratio=0.8,
        learning_rate=2.5e-4,
        learning_rate_schedule=1.0,
        learning_rate_scale=1.0,
        learning_rate_backoff=0.25,
        lag_max=3,
        lag_limit_steps=4,
        workers={
            "a": WorkerSignals(in_flight=2, silent_s=0.0),
            "b": WorkerSignals(in_flight=0, silent_s=0.0),
        },
    )
    line = facts(RUN.spec, known, eta_s=5400.0, workers_desired=3, checkpoint_step=100)
    assert line == (
        "step 120/300, 1h 30m to go · reward 0.430 · ESS 50% of on-policy"
        " · rate 0.00025 (backoff x0.25) · lag 3, limit 4 of 8 · workers busy 1 of 3"
        " · checkpoint at step 100"
    )
    assert facts(RUN.spec, signals()) == "step 120/300 · lag -, limit 8 of 8"


def test_a_trend_is_a_change_beyond_the_noise_of_the_rewards():
    # Halves of 0.1 and 0.5 with a spread of 0.01 each: 0.4 is far beyond two errors of 0.007.
    assert trend([0.09, 0.11, 0.09, 0.11, 0.49, 0.51, 0.49, 0.51]) == ", rising"
    assert trend([0.49, 0.51, 0.49, 0.51, 0.09, 0.11, 0.09, 0.11]) == ", falling"
    # Halves of 0.5 and 0.55 with a spread of 0.3: an error of 0.21.
    assert trend([0.2, 0.8, 0.2, 0.8, 0.25, 0.85, 0.25, 0.85]) == ", level"
    assert trend([0.1] * 3 + [0.9] * 4) == ""
