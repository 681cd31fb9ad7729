"""Draw a dashboard as a picture, from a Prometheus that scraped a run.

    python scripts/draw_board.py --prometheus http://127.0.0.1:9090 --run sort-digits

Perses draws it (https://perses.dev), because it is published as a library that needs no server. The
first call installs it from npm into ``.perses``, with the versions of
``monitoring/perses/package-lock.json``. Node.js 20 or newer and Chromium must be on the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Final

from PIL import Image

from vcpo_monitoring.dashboards import BOARDS
from vcpo_monitoring.dashboards.perses import picture_height, to_perses

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = ROOT / "monitoring" / "perses"
BUILD: Final = ROOT / ".perses"
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH: Final = 1200
"""Of the page, in CSS pixels; a line of the board has three panels."""
SCALE: Final = 1.5
"""Pixels of the picture for one of the page, so that it is sharp at the width of a README."""
COLORS: Final = 256
"""Colours of the picture's palette, which makes the file a third as large."""
PAGE: Final = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="{css}">
<style>
body {{ margin: 0; background: #fff }}
#board {{ padding: 4px 8px }}
/* A legend of five names fits into a line below a panel. */
.MuiListItemButton-root {{ padding: 0 6px 0 0 !important }}
.MuiListItemButton-root * {{ font-size: 11px !important }}
</style>
<div id="board"></div>
<script>window.BOARD = {board}; window.SOURCE = {source};</script><script src="{script}"></script>
"""


def main() -> int:
    """Draw the board; the exit status is 1 when a program that it takes is missing."""
    arguments = _arguments()
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    npm = shutil.which("npm")
    if browser is None or npm is None:
        sys.stderr.write("Drawing a board takes Chromium and Node.js with npm; install both.\n")
        return 1
    start, end = _span(arguments.prometheus, arguments.run)
    _bundle(npm)
    board = next(board for board in BOARDS if board.uid == arguments.board)
    drawn = to_perses(
        board,
        run=arguments.run,
        namespace=".*",
        interval=arguments.interval,
        rows=frozenset(arguments.rows),
    )
    source = {"url": arguments.prometheus, "step": arguments.step, "start": start, "end": end}
    page = PAGE.format(
        board=json.dumps(drawn),
        source=json.dumps(source),
        script=(BUILD / "board.js").as_uri(),
        css=(BUILD / "board.css").as_uri(),
    )
    _photograph(browser, page, picture_height(drawn), arguments.out)
    sys.stderr.write(f"{arguments.out}: {arguments.out.stat().st_size / 1000:.0f} kB\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", required=True, help="address of the Prometheus")
    parser.add_argument("--run", required=True, help="name of the run, as the label `run` has it")
    parser.add_argument(
        "--board",
        choices=[board.uid for board in BOARDS],
        default="vcpo-off-policy",
        help="the board's uid (default: %(default)s)",
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="ids of rows; all if unset")
    parser.add_argument("--step", default="2s", help="time between points (default: %(default)s)")
    parser.add_argument("--interval", default="8s", help="window of rates, 4 scrapes or more")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/board.png"),
        help="the picture (default: %(default)s)",
    )
    return parser.parse_args()


def _bundle(npm: str) -> None:
    """Install what `package-lock.json` names, unless it is there, and bundle the page's script."""
    BUILD.mkdir(exist_ok=True)
    locks = [folder / "package-lock.json" for folder in (SOURCES, BUILD)]
    is_installed = locks[1].is_file() and locks[0].read_bytes() == locks[1].read_bytes()
    for path in SOURCES.iterdir():
        shutil.copy(path, BUILD / path.name)
    if not is_installed or not (BUILD / "node_modules").is_dir():
        sys.stderr.write("installing Perses from npm into .perses (400 MB, once)\n")
        install = (npm, "ci", "--ignore-scripts", "--no-audit")
        subprocess.run(install, cwd=BUILD, check=True)  # noqa: S603
    subprocess.run((npm, "run", "--silent", "build"), cwd=BUILD, check=True)  # noqa: S603


def _span(prometheus: str, run: str) -> tuple[float, float]:
    """Return the time of the first and of the last sample of a run's learner in the last day."""
    scraped = f'timestamp(vcpo_policy_version{{run="{run}"}})[1d:5s]'
    found = []
    for function in ("min_over_time", "max_over_time"):
        query = urllib.parse.urlencode({"query": f"{function}({scraped})"})
        try:
            with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}", timeout=30) as answer:  # noqa: S310
                result = json.load(answer)["data"]["result"]
        except (OSError, ValueError) as error:
            raise SystemExit(f"--prometheus {prometheus}: {error}") from error
        found.append([float(each["value"][1]) for each in result])
    if not found[0]:
        raise SystemExit(f"{prometheus} has no series of a run {run!r}")
    return min(found[0]), max(found[1])


def _photograph(browser: str, page: str, height: int, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        html, photo = Path(folder) / "board.html", Path(folder) / "board.png"
        html.write_text(page)
        command = (
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--allow-file-access-from-files", "--virtual-time-budget=60000"),
            *(f"--window-size={WIDTH},{height}", f"--force-device-scale-factor={SCALE}"),
            *(f"--user-data-dir={folder}/profile", f"--screenshot={photo}", html.as_uri()),
        )
        subprocess.run(command, check=True, timeout=300, capture_output=True)  # noqa: S603
        out.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(photo) as image:
            image.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE).save(
                out, optimize=True
            )


if __name__ == "__main__":
    raise SystemExit(main())
