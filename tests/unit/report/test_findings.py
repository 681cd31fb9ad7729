import pytest

from vcpo.control.verdict import Grade
from vcpo.records.journal import Metrics
from vcpo.report import findings as checks
from vcpo.report.recorded_run import RecordedRun


def metrics_of(*steps, evaluations=()):
    return Metrics(steps=steps, evaluations=tuple(evaluations))


def findings(run, metrics, **changes):
    return checks.findings(RecordedRun(run=run, metrics=metrics, **changes))


def findings_about(run, steps, words):
    return [
        (finding.grade, finding.text)
        for finding in findings(run, metrics_of(*steps))
        if words in finding.text
    ]


def test_a_run_without_steps_is_not_checked(run):
    assert findings(run, metrics_of()) == ()


def test_a_run_that_was_rolled_back_is_told_how_often_and_what_it_cost(run, make_step):
    steps = [
        make_step(step=1),
        make_step(step=2, rollbacks=1, learning_rate_backoff=0.5),
        make_step(step=3, rollbacks=2, learning_rate_backoff=0.25),
    ]
    text = "The run went back to its last good checkpoint 2 times, first at step 2."
    assert findings_about(run, steps, "went back") == [(Grade.NOTICE, text)]


def test_a_lowered_rate_is_told_with_the_step_and_what_is_left(run, make_step):
    backoffs = [1.0, 0.5, 0.25]
    steps = [make_step(step=at, learning_rate_backoff=one) for at, one in enumerate(backoffs, 1)]
    text = (
        "Critical warnings and rollbacks lowered the learning rate from step 2 on; the run ends at"
        " 0.25 of its rate."
    )
    assert findings_about(run, steps, "lowered") == [(Grade.NOTICE, text)]


def test_a_healthy_run_has_only_good_findings(run, make_step):
    grades = [finding.grade for finding in findings(run, metrics_of(make_step()))]
    assert grades == [Grade.GOOD] * 7


def test_a_token_above_the_lag_limit_is_a_broken_promise(run, make_step):
    steps = [make_step(1, lag_max=8), make_step(2, lag_max=11)]
    assert findings_about(run, steps, "lag limit") == [
        (Grade.BAD, "1 step trained on tokens 11 versions old; the lag limit is 8.")
    ]


def test_a_token_at_the_lag_limit_is_allowed(run, make_step):
    ((grade, text),) = findings_about(run, [make_step(lag_max=8)], "lag limit")
    assert grade is Grade.GOOD
    assert "at most 8 of 8 versions" in text


def test_an_ess_ratio_below_the_floor_is_noticed_with_its_worst_step(run, make_step):
    low = make_step(2, ess_ratio=0.05, on_policy_ess_ratio=0.8, learning_rate_scale=0.25)
    lower = make_step(3, ess_ratio=0.02, on_policy_ess_ratio=0.8, learning_rate_scale=0.158)
    ((grade, text),) = findings_about(run, [make_step(1), low, lower], "ESS ratio")
    assert grade is Grade.NOTICE
    assert text.startswith("2 steps had an ESS ratio below the floor (10% of on-policy)")
    assert "0.020 at step 3, where the learning rate was scaled to 0.16" in text


def test_the_ess_floor_is_relative_to_the_on_policy_ratio(run, make_step):
    step = make_step(ess_ratio=0.05, on_policy_ess_ratio=0.4)
    ((grade, _),) = findings_about(run, [step], "ESS ratio")
    assert grade is Grade.GOOD


def test_a_run_that_never_updated_is_bad_news_with_the_cure(run, make_step):
    steps = [make_step(number, skipped="no_gradient") for number in range(1, 9)]
    ((grade, text),) = findings_about(run, steps, "made an update")
    assert grade is Grade.BAD
    assert text.startswith("No step made an update (8 of 8 were skipped), the model is unchanged")
    assert "Cure: a reward that distinguishes responses" in text


def test_a_run_that_stopped_updating_is_bad_news_with_the_cure(run, make_step):
    steps = [make_step(1), *(make_step(n, skipped="no_gradient") for n in range(2, 12))]
    ((grade, text),) = findings_about(run, steps, "made no update")
    assert grade is Grade.BAD
    assert text.startswith("The last 10 steps made no update: all responses to a prompt have")


def test_skipped_steps_are_counted_by_reason(run, make_step):
    steps = [
        make_step(1, skipped="diverged"),
        make_step(2, skipped="diverged"),
        make_step(3, skipped="no gradient"),
        make_step(4),
    ]
    assert findings_about(run, steps, "no update") == [
        (
            Grade.NOTICE,
            "3 steps made no update, marked ▲ below the curves: diverged (2), no gradient (1).",
        )
    ]


def test_trajectories_that_do_not_add_up_are_a_broken_promise(run, make_step):
    steps = [make_step(1), make_step(2, leased=103), make_step(3, leased=150)]
    ((grade, text),) = findings_about(run, steps, "add up")
    assert grade is Grade.BAD
    assert "since step 2" in text
    assert "is 3, not 0" in text


def test_a_learner_that_starves_is_noticed(run, make_step):
    ((grade, text),) = findings_about(run, [make_step(step_s=1.0, idle_s=3.0)], "waited")
    assert (grade, text) == (
        Grade.NOTICE,
        "The learner waited for data 75% of its time; more workers would help.",
    )


def test_the_worst_findings_come_first(run, make_step):
    steps = [make_step(1, lag_max=9, skipped="loss is not finite"), make_step(2)]
    grades = [finding.grade for finding in findings(run, metrics_of(*steps))]
    assert grades == [Grade.BAD, Grade.NOTICE, *[Grade.GOOD] * 5]


def test_a_reward_that_collapsed_is_bad_news(run, make_step, make_evaluation):
    evaluations = [make_evaluation(0, 0.8), make_evaluation(4, 0.3)]
    worst = findings(run, metrics_of(make_step(4), evaluations=evaluations))[0]
    assert worst.grade is Grade.BAD
    assert worst.text.startswith("The run collapsed: the accuracy on held-out prompts fell from")


def test_a_reward_that_collapsed_and_recovered_is_bad_news_too(run, make_step, make_evaluation):
    evaluations = [make_evaluation(step, accuracy) for step, accuracy in ((0, 1), (2, 0), (4, 0.9))]
    worst = findings(run, metrics_of(make_step(4), evaluations=evaluations))[0]
    assert worst.grade is Grade.BAD
    assert "and recovered: it ends at 0.9" in worst.text


@pytest.mark.parametrize("level", ["critical", "dead"])
def test_a_run_that_ends_with_a_critical_warning_has_a_bad_finding(run, make_step, level):
    last = make_step(4, warning_level=level, warning_score=0.9)
    ((grade, text),) = findings_about(run, [make_step(3), last], "early warning")
    assert grade is Grade.BAD
    assert text.startswith(f"The early warning is {level} at the last step (score 0.90)")


def test_a_critical_warning_that_passed_is_noticed(run, make_step):
    steps = [make_step(2, warning_level="critical"), make_step(3)]
    assert findings_about(run, steps, "early warning") == [
        (
            Grade.NOTICE,
            "The early warning was critical at 1 step, first at step 2; it is ok at the last step.",
        )
    ]


def test_a_warning_below_critical_is_noticed(run, make_step):
    steps = [make_step(2, warning_level="warn"), make_step(3, warning_level="warn")]
    ((grade, text),) = findings_about(run, steps, "early warning")
    assert (grade, text) == (Grade.NOTICE, "The early warning warned at 2 steps, first at step 2.")


def test_a_step_whose_weights_have_no_value_has_no_low_ess(run, make_step):
    ((grade, _),) = findings_about(run, [make_step(ess_ratio=0.0, skipped="nan")], "ESS ratio")
    assert grade is Grade.GOOD
