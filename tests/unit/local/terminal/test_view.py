import io

import pytest
from rich.console import Console

from tests.fixtures.run_views import view_with
from vcpo.local.terminal.panel import sparkline
from vcpo.local.terminal.view import PlainView, RichView, make_view, plain_line

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
        "training 120/400  reward 0.431  accuracy 0.380  ess 0.71 (on-policy 0.92)  "
        "lr 1.25e-07 (ESS x0.88, backoff x0.25)  "
        "lag p50 2 max 5 of 8  lag limit 4  warning critical 0.71  "
        "cut 70%  equal groups 25%  prompt 46 tok  "
        "buffered 48  in flight 96  workers 1/2  1,234 tok/s  elapsed 2m 13s  eta 5m 11s"
    )


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
        ([], None, ""),
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
