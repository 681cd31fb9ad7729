"""The panel of one run: numbers, trends, notices and the last events."""

import math
from collections import deque
from collections.abc import Sequence

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from vcpo.control.limits import SIGNALS_MAX_AGE_S
from vcpo.judgement import Grade, Judgement
from vcpo.local.terminal.run_view import (
    RunView,
    age_notices,
    drain_notices,
    of_last_step,
    printable,
)
from vcpo.report.numbers import UNKNOWN, decimal, duration
from vcpo.report.outcome import scale_words

_BLOCKS = "▁▂▃▄▅▆▇█"
_VALUE_WIDTH = 14
_TREND_WIDTH = 16
_EVENTS_SHOWN = 4
_NARROW = 70
"""Columns of a terminal below which each number has a line of its own."""
_Trend = Sequence[float | None]
_RAMP_STEPS = 10
"""First steps, in which the trust region has seen too little to be wide."""
_HEALTHY_ESS_SHARE = 0.5
_ALARMING_ESS_SHARE = 0.1
GRADE_STYLES = {Grade.GOOD: "green", Grade.NOTICE: "bold yellow", Grade.BAD: "bold red"}
WARNING_STYLES = {"ok": "green", "warn": "yellow", "critical": "bold red", "dead": "bold red"}


class RunPanel:
    """Remembers the trends and the last events of a run, and draws them with its state."""

    def __init__(self) -> None:
        self._view: RunView | None = None
        self._rewards: deque[float | None] = deque(maxlen=_TREND_WIDTH)
        self._ess_ratios: deque[float | None] = deque(maxlen=_TREND_WIDTH)
        self._events: deque[str] = deque(maxlen=_EVENTS_SHOWN)

    def update(self, view: RunView) -> None:
        last = view.signals.last
        if last is not None and (self._view is None or last.step != self._view.signals.step):
            self._rewards.append(last.reward_mean)
            self._ess_ratios.append(last.ess_ratio or None)
        self._view = view

    def event(self, message: str) -> None:
        self._events.append(printable(message))

    def render(self, width: int) -> Panel:
        """Return the panel as it is now, for a terminal of so many columns."""
        view = self._view
        events = [
            Text(f"· {message}", style="dim", no_wrap=True, overflow="ellipsis")
            for message in self._events
        ]
        if view is None:
            return Panel(Group(*events), border_style="dim")
        numbers = _numbers(view, [*self._rewards], [*self._ess_ratios], is_narrow=width < _NARROW)
        verdict, *others = view.judgements
        is_too_old = view.signals.age_s >= SIGNALS_MAX_AGE_S  # nobody steers the run any more
        old = "bold red" if is_too_old else "bold yellow"
        notices = [
            *(Text(age, style=old) for age in age_notices(view)),
            *(Text(wait, style="bold") for wait in drain_notices(view)),
            *map(_judgement_text, others),
        ]
        title = Text.assemble(
            (f"{printable(view.run.metadata.name)} ", "bold"), printable(view.phase)
        )
        timing = Text(f"{duration(view.elapsed_s)} elapsed · ETA {duration(view.eta_s)}", "dim")
        return Panel(
            Group(
                _judgement_text(verdict),
                _progress(view),
                Styled(numbers, "dim" if age_notices(view) else ""),
                *notices,
                *events,
            ),
            title=title,
            title_align="left",
            subtitle=timing,
            subtitle_align="right",
        )


def _judgement_text(one: Judgement) -> Text:
    return Text(printable(str(one)), GRADE_STYLES[one.grade])


def sparkline(values: _Trend, *, low: float | None = None) -> str:
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


def _progress(view: RunView) -> Table:
    step = view.signals.step
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(total=view.run.spec.steps, completed=step)
    row.add_row(f"step {step}/{view.run.spec.steps}", bar, f"{step / view.run.spec.steps:.0%}")
    return row


def _numbers(view: RunView, rewards: _Trend, ess_ratios: _Trend, *, is_narrow: bool) -> Table:
    table, across = Table.grid(padding=(0, 2)), 2 if is_narrow else 4
    for style in ("dim", "", "dim", "")[:across]:
        table.add_column(style=style, no_wrap=True, min_width=9 if style else None)
    trends = {"reward": sparkline(rewards), "ess": sparkline(ess_ratios, low=0.0)}
    cells: list[str | Text] = []
    for label, (value, style) in numbers_of(view).items():
        text = Text(value, style)
        if label in trends:
            text = Text.assemble((f"{value:<{_VALUE_WIDTH}}", style), (trends[label], "cyan"))
        cells += [label, text]
    for first in range(0, len(cells), across):
        table.add_row(*cells[first : first + across])
    return table


def numbers_of(view: RunView) -> dict[str, tuple[str, str]]:
    """Return the numbers of a run by label, each with its style."""
    signals, most_lag = view.signals, view.max_policy_lag_steps
    limit = signals.lag_limit_steps
    lag_max = signals.last.lag_max if signals.last else 0
    backoff = signals.last.learning_rate_backoff if signals.last else 1.0
    p50, most = (of_last_step(view, name, "d") for name in ("lag_p50", "lag_max"))
    on_policy = of_last_step(view, "on_policy_ess_ratio", ".2f")
    equal = of_last_step(view, "equal_groups_ratio", ".0%")
    level, score = signals.warning_level or "", of_last_step(view, "warning_score", ".2f")
    is_short = view.workers_ready < view.workers_desired
    return {
        "reward": (of_last_step(view, "reward_mean", ".3f"), "bold"),
        "held out": (decimal(signals.accuracy, ".3f"), "bold"),
        "ess": (f"{of_last_step(view, 'ess_ratio', '.2f')} of {on_policy}", ess_style(view)),
        "lag": (f"p50 {p50} max {most} of {most_lag}", "bold red" if lag_max > most_lag else ""),
        "lr": (rate_text(view), "yellow" if backoff < 1.0 else ""),
        "lag limit": (f"{limit}", "yellow" if limit < most_lag else ""),
        "warning": (f"{level} {score}", WARNING_STYLES.get(level, "")),
        "workers": (
            f"{view.workers_ready} of {view.workers_desired}",
            "yellow" if is_short else "",
        ),
        "answers": (
            f"{of_last_step(view, 'cut_responses_ratio', '.0%')} cut, {equal} of groups equal",
            "",
        ),
        "prompt": (f"{of_last_step(view, 'prompt_tokens_mean', '.0f')} tokens", ""),
        "queue": (f"{signals.buffered} buffered, {signals.in_flight} in flight", ""),
        "speed": (f"{of_last_step(view, 'tokens_per_s', ',.0f')} tokens/s", ""),
    }


def rate_text(view: RunView) -> str:
    """Return the effective learning rate and its factors."""
    rate, step = view.signals.effective_rate, view.signals.step
    if rate is None:
        return UNKNOWN
    scale = scale_words(view.run.spec.algorithm)
    if scale != "ESS" and 0.0 < rate.scale < 1.0 and step <= _RAMP_STEPS:  # it doubles each step
        full = step + math.ceil(-math.log2(rate.scale))
        return f"{rate.rate:.3g} (begins low: x{rate.scale:.2g}, full by about step {full})"
    return str(rate).replace("scale", scale)


def ess_style(view: RunView) -> str:
    """Return the color of the relative ESS."""
    share = view.signals.relative_ess_ratio
    if share is None:
        return ""
    if share >= _HEALTHY_ESS_SHARE:
        return "green"
    return "yellow" if share >= _ALARMING_ESS_SHARE else "bold red"
