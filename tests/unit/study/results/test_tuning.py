"""The choice of learning rates."""

from __future__ import annotations

import pytest

from tests.fixtures.study import record
from vcpo_study.results.tuning import synchronous_rates, tuned_rates


def candidate(method, rate, accuracy, seed=101):
    return record(method, 0, [accuracy], seed=seed, learning_rate=rate)


def chosen_rates(*records):
    return {each.method: each.learning_rate for each in tuned_rates(records) if each.chosen}


def test_each_method_gets_the_rate_that_ends_highest():
    low, high = (
        [candidate("a", 1e-4, 0.8), candidate("b", 1e-4, 0.9)],
        [
            candidate("a", 1e-3, 0.9),
            candidate("b", 1e-3, 0.1),
        ],
    )
    assert chosen_rates(*low, *high) == {"a": 1e-3, "b": 1e-4}


def test_seeds_are_averaged():
    lucky = [candidate("a", 1e-3, 1.0, seed=1), candidate("a", 1e-3, 0.4, seed=2)]
    steady = [candidate("a", 1e-4, 0.8, seed=1), candidate("a", 1e-4, 0.8, seed=2)]
    judged = tuned_rates([*lucky, *steady])
    assert [(each.learning_rate, each.num_seeds) for each in judged] == [(1e-4, 2), (1e-3, 2)]
    assert [each.final_accuracy for each in judged] == pytest.approx([0.8, 0.7])
    assert [each.chosen for each in judged] == [True, False]


def test_of_equals_the_lower_rate_is_taken():
    assert chosen_rates(candidate("a", 1e-3, 0.9), candidate("a", 1e-4, 0.9)) == {"a": 1e-4}


def test_a_method_that_was_not_tuned_yet_has_no_rate():
    assert synchronous_rates(tuned_rates([candidate("vcpo", 1e-3, 0.5)])) == {"vcpo": 1e-3}
