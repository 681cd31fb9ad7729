"""Write pictures of what a terminal shows of runs into the docs; with ``--check`` only compare.

The runs are made up: one that learns, and one whose data is far off policy. Each picture is SVG.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Final

from rich.console import Console, RenderableType

from tests.fixtures.run_views import view_with
from vcpo.local.terminal.panel import RunPanel
from vcpo.local.terminal.run_view import RunView
from vcpo.monitor.run_row import RunRow
from vcpo.monitor.screen import TopScreen

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


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    raise SystemExit(main())
