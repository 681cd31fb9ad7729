"""The live view of `vcpo run`: a panel on a terminal, plain lines otherwise.

The caller passes a `RunView` at every turn, and the view decides what to print. A view prints only
through its console.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from vcpo.report.numbers import decimal, duration, whole

PLAIN_INTERVAL_S = 5.0
"""Shortest time between two lines of the plain view while phase and accuracy do not change."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_VALUE_WIDTH = 14
_TREND_WIDTH = 16
_EVENTS_SHOWN = 4
_HEALTHY_ESS_SHARE = 0.5
_ALARMING_ESS_SHARE = 0.1
_WARNING_STYLES = {"ok": "green", "warn": "yellow", "critical": "bold red", "dead": "bold red"}
OLD_S = 10.0
"""Age from which numbers are shown with their age, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """State of a run for the live view; None means not known yet."""

    run_name: str
    phase: str
    """`starting`, `restarting`, `silent`, or the phase that the learner reports."""
    step: int
    """Optimizer steps taken."""
    total_steps: int
    reward_mean: float | None
    """Mean reward of the last step's trajectories."""
    accuracy: float | None
    """Mean reward of the last evaluation on held-out prompts."""
    ess_ratio: float | None
    """ESS ratio of the last batch, in [1/B, 1]."""
    on_policy_ess_ratio: float | None
    """ESS ratio at lag 0, in (0, 1]."""
    learning_rate_scale: float | None
    """Factor on the base learning rate in the last step, in [0, 1]."""
    lag_p50: int | None
    """Median lag of the last step's tokens, in policy versions."""
    lag_max: int | None
    """Largest lag of the last step's tokens, in policy versions."""
    lag_bound: int
    """Lag above which a trajectory is dropped, in policy versions."""
    admission_lag_steps: int | None = None
    """Lag limit in force, in policy versions; below `lag_bound` the run is throttled."""
    warning_level: str | None = None
    """Early warning of a collapse: ok, warn, critical or dead."""
    warning_score: float | None = None
    """Severity of its worst signal, in [0, 1]."""
    buffered: int
    """Trajectories waiting for the learner."""
    in_flight: int
    """Trajectories being generated."""
    workers_ready: int
    workers_desired: int
    tokens_per_s: float | None
    """Response tokens accepted per second."""
    elapsed_s: float
    eta_s: float | None
    """Estimated seconds to the last step."""
    signals_age_s: float | None = None
    """Age of the learner's signals, in seconds."""
    signals_max_age_s: float = math.inf
    """Age from which the control loop does not act on signals, in seconds."""
    notices: tuple[str, ...] = ()
    """Warnings, one sentence each. The plain view omits them, because events say the same."""


class LiveView(Protocol):
    """Shows the progress of a run; a context manager around all updates."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def update(self, view: RunView) -> None:
        """Show the current state of the run."""

    def event(self, message: str) -> None:
        """Show an event."""


def make_view(console: Console) -> RichView | PlainView:
    """Return the panel for a capable UTF-8 terminal, otherwise plain lines."""
    is_utf8 = console.encoding.lower().startswith("utf")
    if console.is_terminal and not console.is_dumb_terminal and is_utf8:
        return RichView(console)
    return PlainView(console)


class RichView:
    """A panel that is redrawn in place at every update."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)
        self._view: RunView | None = None
        self._rewards: deque[float | None] = deque(maxlen=_TREND_WIDTH)
        self._ess_ratios: deque[float | None] = deque(maxlen=_TREND_WIDTH)
        self._events: deque[str] = deque(maxlen=_EVENTS_SHOWN)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def update(self, view: RunView) -> None:
        """Redraw the panel; a new step adds a point to the sparklines."""
        if view.step > 0 and (self._view is None or view.step != self._view.step):
            self._rewards.append(view.reward_mean)
            self._ess_ratios.append(view.ess_ratio)
        self._view = view
        self._redraw()

    def event(self, message: str) -> None:
        """Add a line below the numbers; only the last few lines are kept."""
        self._events.append(_printable(message))
        self._redraw()

    def _redraw(self) -> None:
        view = self._view
        events = [
            Text(f"· {message}", style="dim", no_wrap=True, overflow="ellipsis")
            for message in self._events
        ]
        if view is None:
            self._live.update(Panel(Group(*events), border_style="dim"), refresh=True)
            return
        numbers = _numbers(view, sparkline(self._rewards), sparkline(self._ess_ratios, low=0.0))
        notices = [
            *(Text(age, style=_age_style(view)) for age in _age(view)),
            *(Text(_printable(notice), style="bold yellow") for notice in view.notices),
        ]
        title = Text.assemble((f"{_printable(view.run_name)} ", "bold"), _printable(view.phase))
        timing = Text(f"{duration(view.elapsed_s)} elapsed · ETA {duration(view.eta_s)}", "dim")
        panel = Panel(
            Group(_progress(view), Styled(numbers, "dim" if _age(view) else ""), *notices, *events),
            title=title,
            title_align="left",
            subtitle=timing,
            subtitle_align="right",
        )
        self._live.update(panel, refresh=True)


class PlainView:
    """One line every few seconds, for logs and pipes; ASCII only."""

    def __init__(
        self,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = PLAIN_INTERVAL_S,
    ) -> None:
        self._console = console
        self._clock = clock
        self._interval_s = interval_s
        self._printed_at_s = -math.inf
        self._printed: RunView | None = None
        self._latest: RunView | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._latest is not None and self._latest != self._printed:
            self._print_latest(self._latest)

    def update(self, view: RunView) -> None:
        """Print a line if one is due, or if the phase or the accuracy changed."""
        self._latest = view
        waited_s = self._clock() - self._printed_at_s
        before = self._printed
        has_changed = before is None or (
            (before.phase, before.accuracy) != (view.phase, view.accuracy)
        )
        if has_changed or waited_s >= self._interval_s:
            self._print_latest(view)

    def event(self, message: str) -> None:
        """Print an event at once."""
        self._write(f"* {_printable(message)}")

    def _print_latest(self, view: RunView) -> None:
        self._printed = view
        self._printed_at_s = self._clock()
        self._write(plain_line(view))

    def _write(self, line: str) -> None:
        text = line.encode("ascii", errors="replace").decode("ascii")
        self._console.print(Text(text), soft_wrap=True)


def plain_line(view: RunView) -> str:
    """Return the state of a run in one line."""
    on_policy = decimal(view.on_policy_ess_ratio, ".2f")
    facts = [
        f"{view.phase} {view.step}/{view.total_steps}",
        f"reward {decimal(view.reward_mean, '.3f')}",
        f"accuracy {decimal(view.accuracy, '.3f')}",
        f"ess {decimal(view.ess_ratio, '.2f')} (on-policy {on_policy})",
        f"lr x{decimal(view.learning_rate_scale, '.2f')}",
        f"lag {_lag(view)}",
        f"admission {whole(view.admission_lag_steps)}",
        f"warning {_warning(view)}",
        f"buffered {view.buffered}",
        f"in flight {view.in_flight}",
        f"workers {view.workers_ready}/{view.workers_desired}",
        f"{decimal(view.tokens_per_s, ',.0f')} tok/s",
        f"elapsed {duration(view.elapsed_s)}",
        f"eta {duration(view.eta_s)}",
        *_age(view),
    ]
    return "  ".join(facts)


def sparkline(values: Sequence[float | None], *, low: float | None = None) -> str:
    """Draw values as bars of eight heights, with a space for each missing value.

    low: bottom of the scale; None takes the smallest value. The top is the largest value.
    """
    present = [value for value in values if value is not None and math.isfinite(value)]
    if not present:
        return ""
    bottom = min(present) if low is None else low
    span = max(present) - bottom
    return "".join(_bar(value, bottom, span) for value in values)


def _bar(value: float | None, bottom: float, span: float) -> str:
    if value is None or not math.isfinite(value):
        return " "
    share = (value - bottom) / span if span > 0 else 0.5
    return _BLOCKS[min(len(_BLOCKS) - 1, max(0, int(share * len(_BLOCKS))))]


def _age(view: RunView) -> list[str]:
    """Return a sentence on the age of the numbers if they are old."""
    if view.signals_age_s is None or view.signals_age_s < OLD_S:
        return []
    age = duration(view.signals_age_s)
    return [f"the learner has not answered for {age}: the numbers are {age} old"]


def _age_style(view: RunView) -> str:
    """Return yellow; red from the age at which nobody steers the run any more."""
    is_too_old = (view.signals_age_s or 0.0) >= view.signals_max_age_s
    return "bold red" if is_too_old else "bold yellow"


def _progress(view: RunView) -> Table:
    share = view.step / view.total_steps if view.total_steps else 0.0
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(total=view.total_steps, completed=view.step)
    row.add_row(f"step {view.step}/{view.total_steps}", bar, f"{share:.0%}")
    return row


def _numbers(view: RunView, rewards: str, ess_ratios: str) -> Table:
    scale = decimal(view.learning_rate_scale, ".2f")
    speed = f"{decimal(view.tokens_per_s, ',.0f')} tokens/s"
    table = Table.grid(padding=(0, 2))
    for style in ("dim", "", "dim", ""):
        table.add_column(style=style, no_wrap=True)
    reward = _with_trend(decimal(view.reward_mean, ".3f"), "bold", rewards)
    accuracy = Text(decimal(view.accuracy, ".3f"), "bold")
    ess = f"{decimal(view.ess_ratio, '.2f')} of {decimal(view.on_policy_ess_ratio, '.2f')}"
    table.add_row("reward", reward, "accuracy", accuracy)
    table.add_row("ESS ratio", _with_trend(ess, _ess_style(view), ess_ratios), "lr", f"x {scale}")
    is_lag_high = view.lag_max is not None and view.lag_max > view.lag_bound
    lag = Text(_lag(view), "bold red" if is_lag_high else "")
    is_short = view.workers_ready < view.workers_desired
    workers = Text(f"{view.workers_ready} of {view.workers_desired}", "yellow" if is_short else "")
    table.add_row("lag", lag, "workers", workers)
    warning = Text(_warning(view), _WARNING_STYLES.get(view.warning_level or "", ""))
    admission_lag = view.admission_lag_steps
    is_throttled = admission_lag is not None and admission_lag < view.lag_bound
    admission = Text(f"lag up to {whole(admission_lag)}", "yellow" if is_throttled else "")
    table.add_row("warning", warning, "admission", admission)
    table.add_row("queue", f"{view.buffered} buffered, {view.in_flight} in flight", "speed", speed)
    return table


def _with_trend(value: str, style: str, trend: str) -> Text:
    return Text.assemble((f"{value:<{_VALUE_WIDTH}}", style), (f"{trend:<{_TREND_WIDTH}}", "cyan"))


def _ess_style(view: RunView) -> str:
    if view.ess_ratio is None or not view.on_policy_ess_ratio:
        return ""
    share = view.ess_ratio / view.on_policy_ess_ratio
    if share >= _HEALTHY_ESS_SHARE:
        return "green"
    return "yellow" if share >= _ALARMING_ESS_SHARE else "bold red"


def _lag(view: RunView) -> str:
    return f"p50 {whole(view.lag_p50)} max {whole(view.lag_max)} of {view.lag_bound}"


def _warning(view: RunView) -> str:
    if view.warning_level is None:
        return "-"
    return f"{_printable(view.warning_level)} {decimal(view.warning_score, '.2f')}"


def _printable(text: str) -> str:
    """Replace control characters by spaces, so that a message cannot control the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
