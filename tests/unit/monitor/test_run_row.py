"""Rows of `vcpo top`: what a terminal of any width shows, and what a script reads."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tests.unit.monitor.rows import row
from vcpo.monitor.run_row import RunRow, runs_table


def drawn(*rows: RunRow, width: int = 120, chosen: int | None = None, colors=None) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=colors, _environ={})
    console.print(runs_table(rows, width=width, chosen=chosen))
    return out.getvalue().splitlines()


def test_a_row_has_every_number_that_matters():
    _, line = drawn(row())
    assert line.split() == [
        "countdown-001",
        "running",
        "120/400",
        "0.431",
        "0.380",
        "25%",
        "critical",
        "1.25e-07",
        "2/4/8",
        "1/2",
        "1,234",
        "3s",
    ]


@pytest.mark.parametrize("width", [80, 90, 100, 120])
def test_no_terminal_breaks_a_row_or_cuts_a_number(width):
    header, line = drawn(row(), width=width)
    assert len(header.split()) == len(line.split())
    assert "…" not in header + line
    assert {"countdown-001", "running", "120/400", "25%", "critical", "2/4/8"} < set(line.split())


def test_a_narrow_terminal_loses_what_matters_least_first():
    names = [set(drawn(row(), width=width)[0].split()) for width in (120, 111, 80)]
    assert names[0] - names[1] == {"tok/s"}
    assert names[1] - names[2] == {"workers", "acc", "lr", "reward"}


def test_runs_of_one_folder_are_named_without_it():
    lines = drawn(row("runs/a-001"), row("runs/b-001"))
    assert [line.split()[0] for line in lines[1:]] == ["a-001", "b-001"]
    lines = drawn(row("one/a"), row("two/a"))
    assert [line.split()[0] for line in lines[1:]] == ["one/a", "two/a"]


def test_what_is_not_known_is_a_dash():
    unknown = dict.fromkeys(["reward_mean", "accuracy", "ess_ratio", "warning_level", "lag_p50"])
    _, line = drawn(row(since_step_s=None, tokens_per_s=None, **unknown))
    assert "None" not in line
    assert line.split().count("-") == 6


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"phase": "silent"}, "1;31", "silent"),
        ({"phase": "collapsed"}, "1;31", "collapsed"),
        ({"phase": "running"}, "32", "running"),
        ({"phase": "starting"}, "33", "starting"),
        ({"lag_max": 9}, "1;31", "2/4/8"),
        ({}, "33", "2/4/8"),
        ({"age_s": 10.0}, "1;31", "13s"),
    ],
)
def test_what_is_bad_stands_out(changes, code, text):
    _, line = drawn(row(**changes), colors="standard")
    assert re.search(rf"\x1b\[{code}m *{re.escape(text)}", line)


def test_a_script_reads_plain_numbers():
    assert row().to_dict() == {
        "place": "runs/countdown-001",
        "run": "countdown",
        "status": "running",
        "verdict": {
            "grade": "bad",
            "why": "The early warning is critical: few trajectories make the updates.",
            "todo": "Wait ten steps: the run slows down by itself.",
        },
        "step": 120,
        "steps": 400,
        "reward": 0.431,
        "accuracy": 0.38,
        "ess_ratio": 0.23,
        "relative_ess_ratio": pytest.approx(0.25),
        "warning": {"level": "critical", "score": 0.7123},
        "learning_rate": {"rate": 1.25e-7, "schedule": 1.0, "scale": 0.5, "backoff": 0.25},
        "lag": {"p50": 2, "max": 5},
        "lag_limit_steps": 4,
        "max_policy_lag_steps": 8,
        "workers": {"ready": 1, "desired": 2},
        "tokens_per_s": 1234.0,
        "age_s": 3.0,
    }


def test_a_run_of_days_ago_has_an_age_in_days():
    _, line = drawn(row(since_step_s=3 * 86_400.0))
    assert line.split()[-1] == "3d"
