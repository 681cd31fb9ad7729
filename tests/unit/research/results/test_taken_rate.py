"""The rate of a cell's steps, recorded or recomputed from its ESS ratios."""

from __future__ import annotations

from dataclasses import replace

import pytest

from research.results.taken_rate import taken_rate
from research.study import cell_spec
from tests.fixtures.study import STUDY, record, steps, study_document

RATE = 1e-4


def spec(method="{}", lag=2):
    given = "{baseline: groupMean, learningRateRule: none}"
    study = study_document(STUDY.replace(given, method)).spec
    return cell_spec(study, study.method("plain"), lag=lag, learning_rate=RATE, seed=1)


def cell(number, *, lag=2, **columns):
    return replace(record("plain", lag), steps=steps(number, **columns))


def test_recorded_rates_are_taken_as_they_are_from_the_full_lag_on():
    rates = (9.0, 9.0, 1.0, 3.0, 2.0)
    assert taken_rate(spec(), cell(5, learning_rate=rates)) == 2.0


def test_under_the_published_rule_a_quarter_of_the_ess_is_half_of_the_rate():
    method = spec("{method: vcpo, deadBand: 0.0}")
    found = taken_rate(method, cell(5, ess_ratio=(0.25,) * 5, learning_rate=None))
    assert found == pytest.approx(RATE / 2)


def test_without_a_rule_the_requested_rate_is_taken():
    method = spec("{method: grpo}")
    assert taken_rate(method, cell(5, ess_ratio=(0.1,) * 5, learning_rate=None)) == RATE


def test_a_region_that_sees_no_drift_doubles_from_its_start_to_the_requested_rate():
    # 1/32, 1/16, 1/8, 1/4, 1/2: the middle of the last three is 1/4.
    found = taken_rate(spec("{method: vcpo2}"), cell(5, ess_ratio=(1.0,) * 5, learning_rate=None))
    assert found == pytest.approx(RATE / 4)


def test_a_step_with_a_weight_without_a_value_is_taken_at_no_rate():
    ratios = (1.0, 1.0, 0.0, 0.0, 1.0)
    assert taken_rate(spec(), cell(5, ess_ratio=ratios, learning_rate=None)) == 0.0


def test_a_cell_that_took_no_step_has_no_rate():
    assert taken_rate(spec(), cell(0, learning_rate=None)) == 0.0
