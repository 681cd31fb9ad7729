"""Steps in a row in trouble: begun, counted on, and ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fixtures.learner.dispatcher import dispatcher_fixture
from tests.fixtures.learner.models import PAD, llama, sampled_groups, seeded_model
from tests.fixtures.learner.updates import make_spec
from tests.fixtures.operator.prometheus import SCRAPED_S, answer, scrape
from tests.fixtures.records import step_record
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.algo.health.rate_backoff import RateBackoff
from vcpo.api import parse_run
from vcpo.api.optimizer import Optimizer
from vcpo.learner_control import run_signals
from vcpo.metrics import LearnerMetrics
from vcpo.records.journal import Metrics
from vcpo.records.step_record import update_fields
from vcpo.report.recorded_run import recorded_signals
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.streaks import streak_fields, window_fields
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_operator.observed.status import Numbers
from vcpo_operator.signals.prometheus import parse_answer

WELL = {"level": WarningLevel.OK, "has_collapsed": False, "skipped": None, "lag_limit_steps": 8}


def streaks(before=None, **changes):
    return streak_fields(before, **{**WELL, "max_policy_lag_steps": 8, **changes})


def test_a_run_that_is_well_counts_nothing():
    before = step_record(critical_steps=4, collapsed_steps=3, throttled_steps=9, skipped_steps=2)
    assert set(streaks(before).values()) == {0}
    assert set(streaks().values()) == {0}


@pytest.mark.parametrize(
    ("field", "trouble"),
    [
        ("critical_steps", {"level": WarningLevel.CRITICAL}),
        ("critical_steps", {"level": WarningLevel.DEAD}),
        ("collapsed_steps", {"has_collapsed": True}),
        ("throttled_steps", {"lag_limit_steps": 4}),
        ("skipped_steps", {"skipped": "low_ess"}),
    ],
)
def test_a_step_in_trouble_is_the_first_or_one_more(field, trouble):
    assert streaks(**trouble)[field] == 1
    before = step_record(**{"lag_limit_steps": 4, field: 6})
    assert streaks(before, **trouble)[field] == 7


def test_a_limit_that_rises_is_a_recovery():
    before = step_record(lag_limit_steps=3, throttled_steps=30)
    assert streaks(before, lag_limit_steps=4)["throttled_steps"] == 0
    assert streaks(before, lag_limit_steps=2)["throttled_steps"] == 31


def test_a_step_usually_takes_the_mean_of_the_last_ones_with_their_waits():
    last = [step_record(step_s=2.0, idle_s=1.0), step_record(step_s=4.0, idle_s=0.0)]
    taken = window_fields(last, ess_ratio=0.5, step_s=4.0, idle_s=1.0)
    assert taken["step_interval_s"] == (3.0 + 4.0 + 5.0) / 3
    first = window_fields([], ess_ratio=0.5, step_s=900.0, idle_s=60.0)
    assert first["step_interval_s"] == 960.0


def test_the_ess_ratio_is_a_mean_and_a_low_tenth_of_ten_steps_that_have_one():
    def means(*ratios):
        found = window_fields(
            [step_record(ess_ratio=ratio) for ratio in ratios[:-1]],
            ess_ratio=ratios[-1],
            step_s=1.0,
            idle_s=0.0,
        )
        return found["ess_ratio_mean"], found["ess_ratio_low"]

    assert means(0.5, 0.1, 0.9, 0.7) == (pytest.approx(0.55), 0.1)
    assert means(0.01, *[0.5] * 10) == (0.5, 0.5)
    assert means(0.0, 0.5, 0.0) == (0.5, 0.5)
    assert means(0.0) == (None, None)


RUN = parse_run("""
metadata: {name: r}
spec: {model: {name: m}, environment: {name: countdown}, steps: 3, optimizer: {learningRate: 1e-3}}
""")
NAMES = ("rate", "schedule", "scale", "backoff")


@pytest.fixture(scope="module")
def steps():
    """Two steps of a warm-up of four, the second one at a quarter."""
    optimizer = Optimizer.model_validate({"learningRate": 1e-3, "warmupSteps": 4})
    update = PolicyUpdate(
        seeded_model(llama), make_spec().model_copy(update={"optimizer": optimizer}), PAD
    )
    groups, results = sampled_groups(seeded_model(llama)), []
    for version, factor in enumerate([1.0, 0.25]):
        update.health.backoff = RateBackoff(factor=factor)
        results.append(update.step(groups, policy_version=version))
    return [step_record(**update_fields(one), step=at) for at, one in enumerate(results, 1)]


@pytest.fixture
def learner(steps):
    """What the learner tells after the steps: its message, and its metrics by name."""
    fixture = dispatcher_fixture()
    window = fixture.signal_window()
    metrics = LearnerMetrics(run="r")
    gauges = LearnerGauges(metrics, dispatcher=fixture.dispatcher, signals=window)
    for step in steps:
        window.record_step(step)
        gauges.record_step(step, [])
    scraped = {each.name: each.value for one in metrics.registry.collect() for each in one.samples}
    return window.message(), scraped


def numbers(rate):
    return [getattr(rate, name) for name in NAMES]


def test_the_rate_is_that_of_the_spec_times_schedule_scale_and_backoff(steps):
    first, second = (step.effective_rate for step in steps)
    assert (first.schedule, first.backoff) == (0.25, 1.0)
    assert (second.schedule, second.backoff) == (0.5, 0.25)
    assert second.rate == pytest.approx(1e-3 * 0.5 * second.scale * 0.25)
    assert replace(steps[1], skipped="no_gradient").effective_rate is None


def test_metrics_signals_records_and_status_have_the_same_four_numbers(steps, learner):
    expected, (message, scraped) = numbers(steps[1].effective_rate), learner
    names = ["", "_schedule_ratio", "_scale_ratio", "_backoff_ratio"]
    metrics = {f"vcpo_learning_rate{name}": scraped[f"vcpo_learning_rate{name}"] for name in names}
    assert list(metrics.values()) == expected
    _, answered = parse_answer(answer(scrape(**metrics)), now_s=SCRAPED_S)
    signals = run_signals(message)
    recorded = recorded_signals(RUN, Metrics(steps=tuple(steps), evaluations=()), 0.0)
    for found in (signals, answered, recorded):
        assert numbers(found.effective_rate) == expected
    status = Numbers.of(signals).model_dump(by_alias=True)["learningRate"]
    assert list(status.values()) == pytest.approx(expected, rel=1e-3)
    assert list(status) == ["effective", *NAMES[1:]]
