"""Command lines of the benchmarks."""

from __future__ import annotations

import argparse
from typing import Any


def parser_of(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser; its description is the first line of a module's text.

    options: by name, with `_` for `-`, the default, or a pair of it and a help text. The default
        gives the type; a list takes several values, and False makes a switch.
    """
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, given in options.items():
        default, text = given if isinstance(given, tuple) else (given, " ")
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true", help=text)
        else:
            first = default[0] if isinstance(default, list) else default
            several = "*" if isinstance(default, list) else None
            parser.add_argument(option, type=type(first), nargs=several, default=default, help=text)
    return parser
