import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.fixtures.records import EVALUATION, STEP, make_sample
from tests.fixtures.run_views import view_with
from tests.fixtures.signals import signals_message
from vcpo.api import parse_run, run_to_yaml
from vcpo.judgement import skip_cause
from vcpo.learner_control import run_signals
from vcpo.local.terminal.panel import sparkline
from vcpo.local.terminal.run_view import EventFeed, RunView, run_view
from vcpo.local.terminal.summary import Ending, end_lines, interruption_notice, run_summary
from vcpo.local.terminal.view import PlainView, RichView, make_view, plain_line
from vcpo.records.exported_model import ExportedModel, ExportKind
from vcpo.records.journal import EventRecord, EventTail, Journal
from vcpo.records.samples import write_answers
from vcpo.report.recorded_run import read_run
from vcpo.wire.v1 import control_pb2, work_pb2

RUN = parse_run("""
metadata: {name: r}
spec: {model: {name: m}, environment: {name: countdown}, steps: 300}
""")


def view_of(
    signals: control_pb2.Signals | None, *, serves: bool = True, age_s: float = 4.0
) -> RunView:
    return run_view(
        RUN,
        None if signals is None else run_signals(signals).at_age(age_s),
        learner_serves=serves,
        workers_desired=1,
        elapsed_s=9.0,
    )


def signals(**fields) -> control_pb2.Signals:
    return signals_message(phase=work_pb2.RUN_PHASE_RUNNING, **{"step": 20, **fields})


def test_before_the_first_signals_a_run_starts():
    view = view_of(None, serves=False)
    assert (view.phase, view.signals.step, view.signals.warning_level) == ("starting", 0, None)
    assert view.signals.lag_limit_steps == view.max_policy_lag_steps


def test_a_run_whose_learner_is_away_is_not_shown_as_running():
    assert view_of(signals()).phase == "running"
    away = view_of(signals(), serves=False)
    assert (away.phase, away.signals.step, away.signals.age_s) == ("restarting", 20, 4.0)


def test_a_run_whose_learner_does_not_answer_is_not_shown_as_running():
    assert [view_of(signals(), age_s=age_s).phase for age_s in (9.9, 10.0)] == ["running", "silent"]


def test_the_end_is_estimated_from_the_batches_of_late():
    view = view_of(signals(consumed_per_s=8.0))
    assert view.eta_s == (300 - 20) * 16 / 8.0
    assert view_of(signals()).eta_s is None


def event(message: str, *, kind: str = "StepSkipped", source: str = "learner") -> EventRecord:
    return EventRecord(time_unix_s=1.0, source=source, kind=kind, message=message)


@pytest.fixture
def journal(tmp_path) -> Journal:
    return Journal(tmp_path)


@pytest.fixture
def feed(journal, tmp_path) -> EventFeed:
    journal.event(event("of an earlier run"))
    return EventFeed(EventTail(tmp_path), own_source="host")


def test_new_events_are_shown_once(feed, journal):
    assert feed.new_lines() == []
    journal.event(event("one"))
    journal.event(event("low", kind="CollapseWarning"))
    assert feed.new_lines() == ["StepSkipped: one", "CollapseWarning: low"]
    journal.event(event("the host's own", source="host"))
    assert feed.new_lines() == []


def test_repeated_events_are_counted_rather_than_shown(feed, journal):
    for number in range(1, 13):
        journal.event(event(f"step {number}"))
    assert feed.new_lines() == [
        "StepSkipped: step 1",
        "StepSkipped: step 2",
        "StepSkipped: step 3",
        "StepSkipped: step 10 (10 of these so far)",
    ]


@pytest.fixture
def summary(tmp_path) -> dict[str, object]:
    journal = Journal(tmp_path)
    journal.evaluation(EVALUATION)
    skipped = {"ess_ratio": 0.0, "learning_rate_scale": 0.0, "skipped": "not finite"}
    journal.step(replace(STEP, step=1, ess_ratio=0.5, learning_rate_scale=0.75, lag_mean=0.0))
    journal.step(replace(STEP, step=2, workers=3, **skipped))
    counts = {"consumed": 112, "buffered": 4, "ranks": 2}
    updates = {"weight_updates_in_flight": 5, "adapter_swaps": 9, "merged_versions": 4}
    last = {"ess_ratio": 0.25, "lag_mean": 0.5, "lag_max": 2, **counts, **updates}
    journal.step(replace(STEP, step=3, **last))
    journal.evaluation(replace(EVALUATION, step=3, accuracy=0.875))
    return run_summary(tmp_path, Ending.COMPLETE)


def test_a_summary_is_of_all_steps_but_where_a_skipped_one_has_no_weights(summary):
    expected = {
        "accuracy_before": 0.125,
        "accuracy_after": 0.875,
        "steps": 3,
        "skipped_steps": 1,
        "ess_ratio_min": 0.25,
        "learning_rate_scale_min": 0.5,
        "policy_lag_max": 4,
        "policy_lag_mean": (0.0 + 1.25 + 0.5) / 3,
        "seconds_per_step": 0.75 + 0.125,
    }
    assert {name: summary[name] for name in expected} == pytest.approx(expected)


def test_the_mismatch_is_the_mean_of_the_steps_that_measured_it(tmp_path):
    journal = Journal(tmp_path)
    for number, mismatch in enumerate([{}, {"gap_nats": 0.25}, {"gap_nats": 0.5}], start=1):
        journal.step(replace(STEP, step=number, mismatch=mismatch))
    assert run_summary(tmp_path, Ending.COMPLETE)["mismatch_nats_mean"] == 0.375


def test_the_number_of_parameters_is_that_of_the_model_that_the_run_left(summary, tmp_path):
    assert summary["model_parameters"] is None
    folder = tmp_path / "model"
    folder.mkdir()
    kind = ExportKind.MODEL
    ExportedModel(kind=kind, run="r", step=3, base_model="m", parameters=12).write(folder)
    assert run_summary(tmp_path, Ending.COMPLETE)["model_parameters"] == 12


def test_a_collapse_is_told_in_numbers(tmp_path):
    journal = Journal(tmp_path)
    journal.step(replace(STEP, warning_score=0.7))
    for step, accuracy in ((0, 0.8), (1, 0.1), (2, 0.2)):
        journal.evaluation(replace(EVALUATION, step=step, accuracy=accuracy))
    summary = run_summary(tmp_path, Ending.COLLAPSED)
    assert (summary["state"], summary["warning_score_max"]) == ("collapsed", 0.7)
    assert summary["collapse"] == {
        "measure": "accuracy",
        "step": 1,
        "share_of_best_at_end": 0.25,
        "recovered": False,
    }


def test_a_run_without_records_has_an_empty_summary_and_one_evaluation_is_no_second(tmp_path):
    summary = run_summary(tmp_path, Ending.COMPLETE)
    assert (summary["steps"], summary["workers"], summary["accuracy_after"]) == (0, 0, None)
    assert summary["ess_ratio_min"] is summary["policy_lag_max"] is None
    Journal(tmp_path).evaluation(EVALUATION)
    summary = run_summary(tmp_path, Ending.INTERRUPTED)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.125, None)


def test_a_run_ends_with_what_came_of_it_and_the_prompts_whose_reward_changed(tmp_path):
    journal = Journal(tmp_path)
    (tmp_path / "spec.yaml").write_text(run_to_yaml(RUN))
    for step, accuracy in ((0, 0.25), (2, 0.75)):
        journal.evaluation(replace(EVALUATION, step=step, accuracy=accuracy))
    dropped = {"generation_failed": 40, "lag_exceeded": 2}
    journal.step(replace(STEP, step=1, skipped="no_gradient"))
    journal.step(replace(STEP, step=2, time_unix_s=1030.0, dropped=dropped))
    asked = {"question": "What is\n2 + 2?", "answer": "4"}
    same, little = make_sample(prompt_index=1), make_sample(prompt_index=2, question="little?")
    before = make_sample(**asked, response="five\x1b[2J", reward=0.0)
    write_answers(tmp_path, 0, [same, replace(little, reward=0.5), before])
    write_answers(tmp_path, 2, [same, little, make_sample(prompt_index=9), make_sample(**asked)])
    ended = list(end_lines(read_run(tmp_path), Ending.INTERRUPTED, Path("r.html")))
    assert ended == [
        "interrupted at step 2",
        "held-out reward  0.25 -> 0.75 (more than chance, which is ±0.15 with 64 prompts)",
        "steps            2 of 300, in 31s",
        "left out         42 of 128 responses: failed 40, too old 2",
        f"left out         1 of 2 steps: {skip_cause('no_gradient')}",
        "report           r.html",
        "What is 2 + 2?  (right: 4)",
        "    before  five [2J  (reward 0)",
        "    after   4  (reward 1)",
        "little?",
        "    before  4  (reward 0.5)",
        "    after   4  (reward 1)",
    ]


@pytest.mark.parametrize(
    ("checkpoint_step", "last_step", "resumes", "exports"),
    [
        (21, 19, "goes on after step 21.", "the model of step 21"),  # a full disk cost two lines
        (20, 23, "after step 20 and takes steps 21 to 23 anew", "the model of step 20"),
        (None, 1, "after step 0 and takes step 1 anew", "no model"),
        (None, 0, "goes on after step 0.", "no model"),
    ],
)
def test_the_notice_says_what_a_resume_and_an_export_would_find(
    checkpoint_step, last_step, resumes, exports
):
    where = (Path("run.yaml"), Path("runs/r-001"))
    ends = {"checkpoint_step": checkpoint_step, "last_step": last_step}
    first, second = interruption_notice(*where, **ends).splitlines()
    assert "`vcpo run run.yaml --run-dir runs/r-001 --resume`" in first
    assert resumes in first
    assert exports in second


VIEW = view_with(phase="training", ess_ratio=0.71, learning_rate_scale=0.88)
UNKNOWN = ("reward_mean", "accuracy", "ess_ratio", "learning_rate", "tokens_per_s")
NOTHING_KNOWN = view_with(
    phase="training",
    step=0,
    lag_p50=None,
    lag_max=None,
    warning_level=None,
    warning_score=None,
    consumed_per_s=0.0,
    **dict.fromkeys(UNKNOWN),
)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def console_to(file, *, terminal, width=80, colors=None):
    return Console(
        file=file, force_terminal=terminal, width=width, color_system=colors, _environ={}
    )


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def plain(out, clock):
    return PlainView(console_to(out, terminal=False), clock=clock, interval_s=5.0)


def panel_of(*actions, width=80, colors=None):
    """Return the last frame that a panel of so many columns shows after some actions."""
    out = io.StringIO()
    with RichView(console_to(out, terminal=True, width=width, colors=colors)) as view:
        for action in actions:
            action(view)
        out.truncate(0)
        view.event("end of the test")
    return out.getvalue()


def update(view):
    return lambda shown: shown.update(view)


def test_a_panel_draws_a_trend_from_one_point_per_step():
    updates = [
        update(view_with(step=step, reward_mean=reward, ess_ratio=None))
        for step, reward in [(1, 0.0), (1, 0.0), (2, 0.5), (3, 1.0)]
    ]
    assert " ▁▅█ " in panel_of(*updates)


def test_a_narrow_panel_has_a_line_for_each_number():
    lines = panel_of(update(VIEW), width=50).splitlines()
    assert any(line.split()[1:4] == ["lag", "limit", "4"] for line in lines)
    assert any(line.split()[1:4] == ["workers", "1", "of"] for line in lines)


def test_a_panel_shows_nothing_of_what_it_does_not_know():
    panel = panel_of(update(NOTHING_KNOWN))
    assert "None" not in panel
    assert "- of -" in panel


@pytest.mark.parametrize(
    ("ess_ratio", "code"), [(0.46, "32"), (0.45, "33"), (0.093, "33"), (0.091, "1;31")]
)
def test_an_ess_ratio_is_colored_by_its_share_of_the_on_policy_one(ess_ratio, code):
    panel = panel_of(update(view_with(ess_ratio=ess_ratio)), colors="standard")
    assert f"\x1b[{code}m{ess_ratio:.2f} of 0.92" in panel


def test_a_message_cannot_steer_the_terminal_or_the_markup():
    panel = panel_of(lambda view: view.event("\x1b]0;owned\x07 [bold]loud[/bold]"))
    assert "\x1b]0" not in panel
    assert "[bold]loud[/bold]" in panel


def test_a_log_line_holds_every_fact():
    assert plain_line(VIEW) == (
        "training 120/400  reward 0.431  held out 0.380  ess 0.71 of 0.92  lag p50 2 max 5 of 8  "
        "lr 1.25e-07 (trust region x0.88, backoff x0.25)  lag limit 4  warning critical 0.71  "
        "workers 1 of 2  answers 70% cut, 25% of groups equal  prompt 46 tokens  "
        "queue 48 buffered, 96 in flight  speed 1,234 tokens/s  elapsed 2m 13s  eta 5m 11s"
    )


def test_a_rate_that_begins_low_says_when_it_is_full():
    first = view_with(step=1, learning_rate_scale=0.04, learning_rate_backoff=1.0)
    assert "lr 1.25e-07 (begins low: x0.04, full by about step 6)" in plain_line(first)


def test_the_first_update_is_printed_at_once_and_the_next_when_it_is_due(plain, out, clock):
    for clock.now_s, step in [(0.0, 1), (1.0, 2), (4.9, 3), (5.0, 4), (9.9, 5), (10.0, 6)]:
        plain.update(view_with(step=step))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/400", "4/400", "6/400"]


def test_leaving_prints_the_last_state_once(plain, out):
    with plain:
        plain.update(VIEW)
        plain.update(view_with(step=121))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["120/400", "121/400"]


def test_a_terminal_gets_the_panel_and_a_pipe_the_lines(out):
    utf8 = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    assert isinstance(make_view(console_to(utf8, terminal=True)), RichView)
    assert isinstance(make_view(console_to(utf8, terminal=False)), PlainView)


@pytest.mark.parametrize(
    ("values", "low", "bars"),
    [
        ([0.0, 0.5, 1.0], None, "▁▅█"),
        ([4.0, 5.0, 6.0], 0.0, "▆▇█"),
        ([1.0, None, 0.0], None, "█ ▁"),
        ([1.0, float("nan")], 0.0, "█ "),
        ([3.0, 3.0], None, "▅▅"),
        ([None], None, ""),
    ],
)
def test_a_sparkline_has_one_bar_per_value(values, low, bars):
    assert sparkline(values, low=low) == bars


def test_a_notice_is_shown_in_full_however_narrow_the_panel():
    notice = "The last 12 steps made no update: the gradient is not a number."
    words = " ".join(
        panel_of(update(view_with(skipped="non_finite_gradient", skipped_steps=12)), width=50)
        .replace("│", " ")
        .split()
    )
    assert notice in words


PRINTS_LATER = """
import sys
from vcpo.local.terminal.view import leave_lost_terminal
sys.stdin.read()
leave_lost_terminal()
print("to nobody", flush=True)
"""


def test_what_is_printed_after_the_end_of_its_terminal_is_no_error():
    ours, theirs = os.openpty()
    pipes = {"stdin": subprocess.PIPE, "stdout": theirs, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PRINTS_LATER], **pipes) as process:
        os.close(theirs)
        os.close(ours)
        _, told = process.communicate()
    assert (process.returncode, told) == (0, b"")
