"""Which checkpoint is the best one."""

from dataclasses import replace

from tests.fixtures.records import EVALUATION
from vcpo_learner.checkpoints.retention import best_evaluated_step


def evaluated(**accuracies):
    return [
        replace(EVALUATION, step=int(step.removeprefix("at")), accuracy=accuracy)
        for step, accuracy in accuracies.items()
    ]


def test_the_best_is_the_most_accurate_that_has_a_checkpoint_and_the_latest_of_equal_ones():
    found = evaluated(at0=0.1, at50=0.9, at100=0.7, at150=0.7, at200=0.5)
    assert best_evaluated_step(found, [50, 100, 150]) == 50
    assert best_evaluated_step(found, [100, 150, 200]) == 150


def test_without_an_evaluation_none_is_the_best():
    assert best_evaluated_step(evaluated(at10=0.5), [20]) is None
    assert best_evaluated_step([], [20]) is None
