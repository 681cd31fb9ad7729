"""The verdict on a run that took all of its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fixtures.records import EVALUATION, STEP
from vcpo.local.terminal.summary import Ending, outcome_of_complete
from vcpo.records.journal import Metrics


def steps(*skipped: str | None) -> Metrics:
    records = [replace(STEP, step=at, skipped=reason) for at, reason in enumerate(skipped, start=1)]
    return Metrics(steps=tuple(records), evaluations=())


def evaluated(*accuracies: float, level: str = "ok") -> Metrics:
    """A run of one step with these evaluations, and the early warning at its end."""
    records = [replace(EVALUATION, step=at, accuracy=each) for at, each in enumerate(accuracies)]
    return Metrics(steps=(replace(STEP, warning_level=level),), evaluations=tuple(records))


def test_a_run_that_updated_is_complete_without_further_words():
    outcome = outcome_of_complete(steps(None, "no_gradient", None))
    assert (outcome.ending, outcome.message) == (Ending.COMPLETE, "")


def test_a_run_of_skipped_steps_alone_is_no_success_and_says_why():
    outcome = outcome_of_complete(steps(*["no_gradient"] * 8))
    assert int(outcome.ending) == 3
    assert outcome.message.startswith(
        "No step made an update (8 of 8 were skipped), the model is unchanged: all responses"
        " to a prompt have the same reward, so none is better than another. Cure: a reward that"
    )


def test_a_run_that_stopped_learning_says_so_though_it_is_complete():
    outcome = outcome_of_complete(steps(None, *["no_gradient"] * 10))
    assert outcome.ending is Ending.COMPLETE
    assert outcome.message.startswith("The last 10 steps made no update: all responses to a")


def test_a_few_skipped_steps_at_the_end_are_no_news():
    assert outcome_of_complete(steps(None, *["no_gradient"] * 9)).message == ""


def test_a_run_without_records_is_what_its_learner_says():
    assert outcome_of_complete(Metrics(steps=(), evaluations=())).ending is Ending.COMPLETE


def test_a_run_that_collapsed_is_not_called_complete():
    outcome = outcome_of_complete(evaluated(0.9, 0.1))
    assert int(outcome.ending) == 4
    assert outcome.message.startswith("The run collapsed: the accuracy on held-out prompts fell")


def test_a_run_that_recovered_is_complete_and_says_what_happened():
    outcome = outcome_of_complete(evaluated(0.9, 0.1, 0.8))
    assert outcome.ending is Ending.COMPLETE
    assert "collapsed from 0.9 at step 0 to 0.1 at step 1, and recovered" in outcome.message


def test_a_warning_that_is_critical_at_the_end_is_said():
    outcome = outcome_of_complete(evaluated(0.9, level="critical"))
    assert outcome.message.startswith("The early warning is critical at the last step")


@pytest.mark.parametrize(
    "reason", ["non_finite_weight", "non_finite_gradient", "low_ess", "high_divergence"]
)
def test_every_reason_comes_with_a_cure(reason):
    assert "Cure: " in outcome_of_complete(steps(reason)).message


def test_a_reason_of_a_later_version_is_given_as_it_is():
    assert outcome_of_complete(steps("unheard_of")).message.endswith(": unheard_of.")
