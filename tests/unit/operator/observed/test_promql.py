"""Responses of Prometheus, parsed into a learner's signals."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import dispatcher_fixture, work_request
from tests.fixtures.operator.prometheus import LEAST, SCRAPED_S, answer, phases, scrape
from tests.fixtures.records import evaluation_record, step_record
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.control.signals import RunSignals, WorkerSignals
from vcpo.learner_control import run_signals
from vcpo.metrics import LearnerMetrics
from vcpo.wire.phase import RunPhase
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_operator.names import RunKey
from vcpo_operator.observed.promql import parse_answer, run_query

NOW_S = SCRAPED_S + 4.0


def read_signals(samples) -> RunSignals:
    found = parse_answer(answer(samples), now_s=NOW_S)
    assert found is not None
    return found.signals


def test_the_query_asks_for_one_run_of_one_namespace():
    query = run_query(RunKey("ml", "demo"))
    assert query.startswith('{__name__=~"vcpo_learner_phase|vcpo_learner_step|vcpo_policy_version|')
    assert query.endswith('",namespace="ml",run="demo"}[5m]')


def test_a_name_cannot_leave_its_quotes():
    query = run_query(RunKey("ml", 'x"} or up{\\'))
    assert r'run="x\"} or up{\\"}[5m]' in query


def test_the_least_a_learner_says_is_enough():
    signals = read_signals(scrape())
    assert (signals.step, signals.policy_version) == (5, 5)
    assert (signals.buffered, signals.in_flight) == (10, 11)
    assert (signals.batch_trajectories, signals.lag_limit_steps) == (128, 8)
    assert signals.learner_idle_ratio == 0.25


def test_what_was_not_measured_is_unknown():
    signals = read_signals(scrape())
    assert (signals.ess_ratio, signals.learning_rate_scale, signals.accuracy) == (None, None, None)
    assert (signals.ess_ratio_mean, signals.ess_ratio_low) == (None, None)
    assert (signals.lag_p50, signals.lag_max) == (None, None)
    assert (signals.warning_score, signals.warning_level) == (None, None)
    assert signals.on_policy_ess_ratio == 1.0


MEASURED = {
    "vcpo_ess_ratio": 0.5,
    "vcpo_ess_mean_ratio": 0.625,
    "vcpo_ess_low_ratio": 0.375,
    "vcpo_on_policy_ess_ratio": 0.875,
    "vcpo_learning_rate_scale_ratio": 0.75,
    "vcpo_collapse_warning_ratio": 0.6875,
    "vcpo_token_lag_median_steps": 2.0,
    "vcpo_token_lag_max_steps": 7.0,
    "vcpo_evaluation_accuracy": 0.125,
}


def test_what_was_measured_is_read():
    signals = read_signals(scrape(**MEASURED))
    assert (signals.ess_ratio, signals.learning_rate_scale, signals.accuracy) == (0.5, 0.75, 0.125)
    assert (signals.ess_ratio_mean, signals.ess_ratio_low) == (0.625, 0.375)
    assert (signals.lag_p50, signals.lag_max) == (2, 7)
    assert signals.on_policy_ess_ratio == 0.875
    assert (signals.warning_score, signals.warning_level) == (0.6875, WarningLevel.CRITICAL)


def test_a_step_whose_weights_had_no_value_has_no_ess():
    assert read_signals(scrape(vcpo_ess_ratio=0.0)).ess_ratio is None


@pytest.mark.parametrize("phase", RunPhase)
def test_the_phase_is_the_one_whose_series_is_one(phase: RunPhase):
    assert read_signals(scrape(phase=phase.value)).phase is phase


def test_a_phase_of_a_newer_learner_counts_as_running():
    assert read_signals(scrape(phase="pondering")).phase is RunPhase.RUNNING


def test_workers_are_counted_by_group():
    groups = [("vcpo_workers", {"group": name}, SCRAPED_S, n) for name, n in (("a", 2), ("b", 0))]
    assert read_signals([*scrape(), *groups]).ready_workers == {"a": 2, "b": 0}


def test_a_worker_is_known_by_its_pod_and_its_newest_scrape():
    pod = {"pod": "demo-rollout-main-x", "group": "main"}
    samples = [("vcpo_rollout_in_flight", pod, SCRAPED_S - s, n) for s, n in ((20, 9), (5, 6))]
    expected = {"demo-rollout-main-x": WorkerSignals(in_flight=6, silent_s=9.0)}
    assert read_signals([*scrape(), *samples]).workers == expected


def test_a_worker_without_a_pod_is_unknown():
    nameless = ("vcpo_rollout_in_flight", {"group": "main"}, SCRAPED_S, 6.0)
    assert read_signals([*scrape(), nameless]).workers == {}


def test_a_series_that_the_newest_scrape_lacks_is_unknown():
    older = scrape(SCRAPED_S - 15.0, vcpo_ess_mean_ratio=0.9)
    assert read_signals([*older, *scrape()]).ess_ratio_mean is None


def test_a_restarted_learner_is_not_mixed_with_the_one_before():
    before = [
        (name, {**labels, "instance": "10.0.0.1"}, time_s, value)
        for name, labels, time_s, value in scrape(SCRAPED_S - 15.0, vcpo_policy_version=9.0)
    ]
    assert read_signals([*before, *scrape()]).policy_version == 5


def test_a_report_is_as_old_as_its_scrape_is_by_now():
    found = parse_answer(answer(scrape()), now_s=NOW_S)
    assert found is not None
    signals = found.at(NOW_S, is_fresh=True)
    assert (signals.age_s, signals.is_fresh) == (4.0, True)


def test_a_run_without_series_says_nothing():
    assert parse_answer(answer([]), now_s=NOW_S) is None


def test_workers_alone_are_no_report():
    assert parse_answer(answer([("vcpo_rollout_in_flight", {}, 1.0, 1.0)]), now_s=NOW_S) is None


@pytest.mark.parametrize("name", LEAST)
def test_a_scrape_that_lacks_what_a_report_needs_is_refused_by_its_name(name: str):
    with pytest.raises(ValueError, match=f"lacks {name}"):
        read_signals(scrape(**{name: None}))


BAD = {
    "fraction of a step": ({"vcpo_policy_version": 0.5}, "vcpo_policy_version must be a whole"),
    "negative count": ({"vcpo_trajectories_buffered": -1.0}, "vcpo_trajectories_buffered must be"),
    "infinite count": ({"vcpo_trajectories_in_flight": "+Inf"}, "vcpo_trajectories_in_flight"),
    "count beyond a float": ({"vcpo_policy_version": 1e300}, "vcpo_policy_version must be"),
    "ratio above one": ({"vcpo_learner_idle_ratio": 1.5}, "learner_idle_ratio must be in"),
    "no number": ({"vcpo_policy_version": "NaN"}, "lacks vcpo_policy_version"),
    "empty batch": ({"vcpo_batch_trajectories": 0.0}, "batch_trajectories must be above 0"),
    "no phase": ({"phase": "none of them"}, "vcpo_learner_phase must be 1 for one phase"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_a_value_out_of_its_range_is_refused_by_its_name(changes, message: str):
    with pytest.raises(ValueError, match=message):
        read_signals(scrape(**changes))


def test_two_phases_at_once_are_refused():
    two = ("vcpo_learner_phase", {"phase": "resting"}, SCRAPED_S, 1.0)
    with pytest.raises(ValueError, match="must be 1 for one phase"):
        read_signals([*scrape(), two])


def test_two_targets_that_answer_for_one_run_are_refused():
    other = [(name, {**labels, "job": "b"}, *rest) for name, labels, *rest in scrape()]
    with pytest.raises(ValueError, match=r"two series of .* keep one scrape target"):
        read_signals([*scrape(), *other])


def test_a_sample_of_the_future_tells_of_clocks_that_disagree():
    with pytest.raises(ValueError, match="10 s in the future; synchronize the clocks"):
        parse_answer(answer(scrape()), now_s=SCRAPED_S - 10.0)


def test_clocks_may_differ_a_little():
    found = parse_answer(answer(scrape()), now_s=SCRAPED_S - 4.0)
    assert found is not None
    assert found.at(SCRAPED_S - 4.0, is_fresh=True).age_s == 0.0


NO_ANSWERS = {
    "nothing": b"",
    "a page": b"<html>502 Bad Gateway</html>",
    "bytes": b"\xff\xfe",
    "an error": b'{"status":"error","errorType":"bad_data","error":"parse error"}',
    "a vector": b'{"status":"success","data":{"resultType":"vector","result":[]}}',
    "no data": b'{"status":"success"}',
    "no metric": b'{"status":"success","data":{"resultType":"matrix","result":[{}]}}',
    "very deep": b"[" * 100_000,
}


@pytest.mark.parametrize("text", NO_ANSWERS.values(), ids=NO_ANSWERS.keys())
def test_what_is_no_answer_is_refused(text: bytes):
    with pytest.raises(ValueError, match="not an answer of Prometheus' query API"):
        parse_answer(text, now_s=NOW_S)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
)
NAMES = sorted({*LEAST, *MEASURED, "vcpo_learner_phase", "vcpo_workers", "vcpo_rollout_in_flight"})
VALUES = st.floats() | st.integers().map(float) | st.sampled_from([0.0, 0.5, 1.0])
SERIES = st.tuples(
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(["phase", "group", "pod"]), st.sampled_from(["a", "running"])),
    st.sampled_from([SCRAPED_S, SCRAPED_S - 15.0]),
    VALUES,
)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_nonsense_becomes_a_signal(text: bytes):
    with pytest.raises(ValueError, match="not an answer"):
        parse_answer(text, now_s=NOW_S)


@given(st.lists(SERIES, max_size=12), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
def test_whatever_was_scraped_is_a_sound_report_or_a_value_error(series, changes):
    try:
        found = parse_answer(answer([*scrape(**changes), *series]), now_s=NOW_S)
    except ValueError:
        return
    assert found is not None
    signals = found.signals
    shares = (signals.learner_idle_ratio, signals.ess_ratio_mean or 0.0, signals.ess_ratio_low or 0)
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert all(worker.in_flight >= 0 for worker in found.signals.workers.values())


WARNED = {"warning_level": "warn", "warning_score": 0.5}


async def test_what_is_scraped_says_what_the_learner_says():
    fixture = dispatcher_fixture()
    window = SignalWindow(
        run_name="demo",
        total_steps=3,
        batch_trajectories=4,
        dispatcher=fixture.dispatcher,
        clock=fixture.clock,
    )
    metrics = LearnerMetrics(run="demo")
    gauges = LearnerGauges(metrics, dispatcher=fixture.dispatcher, signals=window)
    await fixture.dispatcher.lease(work_request(), wait_s=0)
    for record in (
        step_record(ess_ratio=0.5),
        step_record(ess_ratio=0.25, lag_p50=1, lag_max=3, **WARNED),
    ):
        window.record_step(record)
        gauges.record_step(record, [])
    window.record_evaluation(evaluation_record(accuracy=0.75))
    gauges.record_evaluation(evaluation_record(accuracy=0.75), {0: 0.75})
    assert skipped_in_a_row(metrics) == 0.0
    skipped = step_record(ess_ratio=0.25, lag_p50=1, lag_max=3, skipped="low_ess", **WARNED)
    window.record_step(skipped)
    gauges.record_step(skipped, [])
    assert skipped_in_a_row(metrics) == 1.0
    told = run_signals(window.message())
    scraped = read_signals(exported_samples(metrics))
    names = ("workers", "tokens_per_s", "consumed_per_s", "since_step_s")
    names += ("cut_responses_ratio", "equal_groups_ratio", "prompt_tokens_mean")
    only_by_grpc = {name: getattr(told, name) for name in names}
    assert dataclasses.replace(scraped, **only_by_grpc) == told


def test_steps_without_an_update_are_read_and_a_run_of_nothing_else_is_distinguished():
    skipped = {"vcpo_skipped_steps_in_a_row": 12.0}
    told = read_signals(scrape(vcpo_learner_step=20.0, **skipped))
    assert told.no_update == "The last 12 steps made no update: the learner's log says why."
    assert not read_signals(
        scrape(phase="complete", vcpo_learner_step=20.0, **skipped)
    ).has_never_updated
    assert not read_signals(scrape(vcpo_learner_step=12.0, **skipped)).has_never_updated
    never = read_signals(scrape(phase="complete", vcpo_learner_step=12.0, **skipped))
    assert never.has_never_updated
    assert never.no_update.startswith("No step made an update (12 of 12 were skipped)")


def test_changes_that_a_log_lost_are_read():
    assert read_signals(scrape(vcpo_learner_lost_changes=154.0)).lost_changes == 154
    assert read_signals(scrape()).lost_changes == 0


def test_failures_in_a_row_are_read():
    assert read_signals(scrape(vcpo_failures_in_a_row=32.0)).failures_in_a_row == 32


def test_an_older_learner_that_counts_no_skipped_steps_is_read_too():
    told = read_signals(scrape(phase="complete"))
    assert (told.no_update, told.has_never_updated, told.failures_in_a_row) == ("", False, 0)


def skipped_in_a_row(metrics: LearnerMetrics) -> float | None:
    return metrics.registry.get_sample_value("vcpo_skipped_steps_in_a_row", {"run": "demo"})


def exported_samples(metrics: LearnerMetrics):
    return [
        (sample.name, sample.labels, SCRAPED_S, sample.value)
        for family in metrics.registry.collect()
        for sample in family.samples
    ]


def test_the_fake_replies_name_every_phase():
    assert {phase.value for phase in RunPhase} < {labels["phase"] for _, labels, *_ in phases()}
