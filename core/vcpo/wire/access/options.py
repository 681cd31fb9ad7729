"""The options by which a server's process is told its certificates."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add `--tls`, `--plain-text` and `--health-listen`."""
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="folder with ca.crt, tls.crt and tls.key; they are read again when they change",
    )
    parser.add_argument(
        "--plain-text",
        action="store_true",
        help="serve and call in plain text, also beyond this machine",
    )
    parser.add_argument(
        "--health-listen",
        metavar="HOST:PORT",
        help="where health checks are answered in plain text too, for probes (default: nowhere)",
    )
