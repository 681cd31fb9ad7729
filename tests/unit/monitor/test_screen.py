"""The screen of `vcpo top`: keys choose and open runs, and a choice stays with its run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.unit.monitor.rows import row
from vcpo.monitor.screen import TopScreen

UP, DOWN, ENTER, ESCAPE = b"\x1b[A", b"\x1b[B", b"\r", b"\x1b"


@pytest.fixture
def screen() -> TopScreen:
    screen = TopScreen()
    screen.update([row("runs/a"), row("runs/b"), row("runs/c")])
    return screen


def text_of(screen: TopScreen, notice: str = "") -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None, _environ={})
    console.print(screen.render(width=120, notice=notice))
    return out.getvalue()


def test_enter_opens_the_chosen_run_and_escape_goes_back(screen):
    screen.press(DOWN)
    screen.press(ENTER)
    assert screen.opened == "runs/b"
    assert "p50 2 max 5 of 8" in text_of(screen)
    screen.press(ESCAPE)
    assert screen.opened is None
    assert "lag/lim/max" in text_of(screen)


@pytest.mark.parametrize(
    ("keys", "opened"),
    [
        ([ENTER], "runs/a"),
        ([UP, ENTER], "runs/a"),
        ([DOWN] * 9 + [ENTER], "runs/c"),
        ([DOWN, DOWN, UP, ENTER], "runs/b"),
        ([b"j", b"k", b"j", ENTER], "runs/b"),
        ([ENTER, DOWN], "runs/b"),
        ([b"x", b"\x1b[C"], None),
    ],
)
def test_keys_move_the_choice_within_the_runs(screen, keys, opened):
    for key in keys:
        screen.press(key)
    assert screen.opened == opened


def test_a_choice_stays_with_its_run_when_others_come_and_go(screen):
    screen.press(DOWN)
    screen.update([row("runs/0"), row("runs/a"), row("runs/b")])
    screen.press(ENTER)
    assert screen.opened == "runs/b"


def test_a_run_that_is_gone_is_closed(screen):
    screen.press(ENTER)
    screen.update([row("runs/b")])
    assert screen.opened is None
    screen.press(ENTER)
    assert screen.opened == "runs/b"


def test_without_runs_no_key_does_anything_but_end():
    screen = TopScreen()
    screen.update([])
    for key in (UP, DOWN, ENTER, ESCAPE):
        screen.press(key)
    assert "no runs yet" in text_of(screen)
    assert not screen.is_over
    screen.press(b"q")
    assert screen.is_over


def test_the_opened_run_shows_its_events_and_its_trend(screen):
    screen.press(ENTER)
    screen.show_events(["Throttled: Lag limit 8 -> 4 versions: the ESS ratio is 5.0%."])
    screen.update([row("runs/a", step=121, reward_mean=0.9)])
    shown = text_of(screen)
    assert "Throttled: Lag limit 8 -> 4" in shown
    assert "▁█" in shown


def test_which_directories_cannot_be_read_is_shown(screen):
    assert "runs/d: no run" in text_of(screen, notice="runs/d: no run")
