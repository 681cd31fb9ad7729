"""Write pictures of how runs are shown into the docs; with ``--check`` only compare.

The runs are made up: one that learns, and one whose data is far off policy. Each picture is SVG, as
rich writes what a terminal shows; the top of the report is its own HTML, which a browser lays out.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from pathlib import Path
from typing import Final

from rich.console import Console, RenderableType

from tests.fixtures.records import evaluation_record, step_record
from tests.fixtures.run_views import RUN, view_with
from vcpo.local.terminal.panel import RunPanel
from vcpo.local.terminal.run_view import RunView
from vcpo.monitor.run_row import RunRow
from vcpo.monitor.screen import TopScreen
from vcpo.records.journal import Metrics
from vcpo.records.step_record import StepRecord
from vcpo.report import RecordedRun, render_report

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "docs" / "pictures"
_WIDTH: Final = 118
_WELL: Final = {
    "warning_level": "ok",
    "warning_score": 0.12,
    "ess_ratio": 0.71,
    "learning_rate": 1e-6,
    "learning_rate_scale": 1.0,
    "learning_rate_backoff": 1.0,
    "reward_mean": 0.62,
    "lag_limit_steps": 8,
}
"""Of a run that learns, where it differs from the throttled one of the tests."""
_PAGE: Final = (1000, 584)
"""Width and height of the top of a report, in pixels."""


def rendered_files() -> dict[Path, str]:
    """Text of each picture's file."""
    throttled, well = view_with(since_step_s=3.0), view_with(since_step_s=2.0, **_WELL)
    screen = TopScreen()
    screen.update(
        [
            RunRow(place="runs/countdown-001", view=throttled),
            RunRow(place="runs/countdown-002", view=well),
        ]
    )
    return {
        FOLDER / "panel.svg": _picture(_panel(throttled), "vcpo run"),
        FOLDER / "top.svg": _picture(screen.render(width=_WIDTH), "vcpo top"),
        FOLDER / "report.svg": _top_of(render_report(_throttled_run())),
    }


def main() -> int:
    """Write the files, or check them; the exit status is 1 when a committed one has drifted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on drift")
    is_check = parser.parse_args().check
    files = rendered_files()
    stale = [path for path, text in files.items() if not _holds(path, text)]
    for path in stale:
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path])
        told = "is stale. Cure: python -m scripts.render_views" if is_check else "written"
        sys.stderr.write(f"{path.relative_to(ROOT)} {told}\n")
    return 1 if stale and is_check else 0


def _panel(view: RunView) -> RenderableType:
    panel = RunPanel()
    panel.update(view)
    panel.event("Throttled: lag limit 8 -> 4 versions")
    return panel.render()


def _picture(shown: RenderableType, title: str) -> str:
    console = Console(
        record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(shown)
    return console.export_svg(title=title)


def _throttled_run() -> RecordedRun:
    """Return the throttled run of the panel, as its records tell it."""
    steps = tuple(map(_step, range(1, 121)))
    evaluations = [
        evaluation_record(step=step, time_unix_s=30.0 * step, accuracy=accuracy)
        for step, accuracy in ((0, 0.11), (40, 0.34), (80, 0.41), (120, 0.38))
    ]
    return RecordedRun(run=RUN, metrics=Metrics(steps=steps, evaluations=tuple(evaluations)))


def _step(number: int) -> StepRecord:
    is_stale = number > 112
    return step_record(
        step=number,
        time_unix_s=30.0 * number,
        reward_mean=0.45 - 0.3 * math.exp(-number / 40),
        ess_ratio=0.17 if is_stale else 0.71,
        on_policy_ess_ratio=0.92,
        learning_rate=1.25e-7 if is_stale else 1e-6,
        learning_rate_scale=0.5 if is_stale else 1.0,
        learning_rate_backoff=0.25 if is_stale else 1.0,
        warning_level="critical" if is_stale else "ok",
        warning_score=0.71 if is_stale else 0.12,
        lag_mean=2.4,
        lag_p50=2,
        lag_max=5,
        lag_limit_steps=4 if is_stale else 8,
        step_s=24.0,
        idle_s=3.0,
        tokens_per_s=1234.0,
        response_tokens_mean=212.0,
        workers=2,
        leased=16 * number + 144,
        in_flight=96,
        buffered=48,
        consumed=16 * number,
    )


def _top_of(page: str) -> str:
    """Return what a report says above its curves, as a picture."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    header = page.partition("<body>")[2].partition('<div class="toolbar"')[0]
    width, height = _PAGE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
        f"<style><![CDATA[{style}]]></style>"
        f'<foreignObject width="{width}" height="{height}">'
        f'<body xmlns="http://www.w3.org/1999/xhtml">{header}</main></body>'
        "</foreignObject></svg>\n"
    )


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    raise SystemExit(main())
