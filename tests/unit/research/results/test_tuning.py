"""The synchronous target and rates, on evaluations at steps 0, 10, 20 and so on."""

from __future__ import annotations

import pytest

from research.results.tuning import synchronous_rates, synchronous_target, tuned_rates
from tests.fixtures.study import record

ENDS_AT_80 = [0.2, 0.4, 0.8, 0.8, 0.8]
"""Mean of the last quarter 0.8; the target of a study that knows nothing better is 0.76."""


def tuned(method, rate, accuracies, seed=101):
    return record(method, 0, accuracies, seed=seed, learning_rate=rate)


def chosen(*records):
    return synchronous_rates(tuned_rates(records))


def test_the_target_is_95_percent_of_the_best_method_and_rate():
    records = [tuned("a", 1e-4, ENDS_AT_80), tuned("a", 1e-3, [0.9, 0.6]), tuned("b", 1e-4, [0.7])]
    assert synchronous_target(records) == pytest.approx(0.95 * 0.8)


def test_the_target_judges_means_over_seeds_so_one_lucky_seed_does_not_set_it():
    lucky = [tuned("a", 1e-3, [1.0], seed=1), tuned("a", 1e-3, [0.4], seed=2)]
    steady = [tuned("a", 1e-4, [0.8], seed=1), tuned("a", 1e-4, [0.8], seed=2)]
    assert synchronous_target([*lucky, *steady]) == pytest.approx(0.95 * 0.8)


def test_without_a_record_there_is_no_target_and_no_rate():
    assert synchronous_target([]) is None
    assert tuned_rates([]) == []


def test_each_method_gets_the_rate_that_is_first_at_the_target_of_all():
    slow, fast = [0.2, 0.3, 0.5, 0.8, 0.8], ENDS_AT_80
    a = [tuned("a", 1e-4, slow), tuned("a", 1e-3, fast)]
    b = [tuned("b", 1e-4, fast), tuned("b", 1e-3, slow)]
    assert chosen(*a, *b) == {"a": 1e-3, "b": 1e-4}


def test_the_fastest_rate_is_taken_although_another_ends_higher():
    higher = tuned("a", 1e-4, [0.2, 0.2, 0.2, 0.9, 0.9])
    faster = tuned("a", 1e-3, [0.2, 0.9, 0.86, 0.86, 0.86])
    assert chosen(higher, faster) == {"a": 1e-3}


def test_of_equally_fast_rates_the_lower_is_taken():
    assert chosen(tuned("a", 1e-3, ENDS_AT_80), tuned("a", 1e-4, ENDS_AT_80)) == {"a": 1e-4}


def test_steps_are_the_median_over_seeds_and_a_seed_that_never_arrives_is_infinite():
    # From 0.4 at step 10 to 0.8 at step 20 the target 0.76 is 9 tenths of the way: step 19.
    arrives = [tuned("a", 1e-4, ENDS_AT_80, seed=seed) for seed in (1, 2)]
    judged = tuned_rates([*arrives, tuned("a", 1e-4, ENDS_AT_80, seed=3)])
    assert [(each.steps_to_target, each.num_seeds) for each in judged] == [(pytest.approx(19), 3)]
    never = [tuned("b", 1e-4, [0.5], seed=1), tuned("b", 1e-4, ENDS_AT_80, seed=2)]
    assert tuned_rates([*arrives, *never])[1].steps_to_target is None


def test_a_method_that_never_arrives_gets_the_rate_that_ends_highest():
    never = [tuned("b", 1e-4, [0.3]), tuned("b", 1e-3, [0.5]), tuned("b", 1e-2, [0.5])]
    judged = tuned_rates([tuned("a", 1e-4, ENDS_AT_80), *never])
    assert synchronous_rates(judged)["b"] == 1e-3
    assert [each.steps_to_target for each in judged if each.method == "b"] == [None] * 3
