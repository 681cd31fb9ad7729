"""Write the dashboards into the chart; with ``--check`` only compare.

The boards are described in ``tools/monitoring/dashboards``. Each becomes one file of JSON
for Grafana in ``charts/vcpo/files/dashboards``, from which the chart makes ConfigMaps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from tools.monitoring.dashboards import BOARDS
from tools.monitoring.dashboards.grafana import to_grafana

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "charts" / "vcpo" / "files" / "dashboards"


def rendered_files() -> dict[Path, str]:
    """Text of each dashboard's file."""
    return {FOLDER / f"{board.uid}.json": to_grafana(board) for board in BOARDS}


def main() -> int:
    """Write the files, or check them; the exit status is 1 when a committed one has drifted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on drift")
    arguments = parser.parse_args()
    files = rendered_files()
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
    extra = sorted(set(FOLDER.glob("*.json")) - files.keys())
    for path in (*stale, *extra):
        if not arguments.check and path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path])
        elif not arguments.check:
            path.unlink()
        found = "is stale. Fix: python -m scripts.render_dashboards"
        written = "written" if path in files else "deleted"
        sys.stderr.write(f"{path.relative_to(ROOT)} {found if arguments.check else written}\n")
    return 1 if (stale or extra) and arguments.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
