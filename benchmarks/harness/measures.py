"""Command lines of the benchmarks, and what a process has used: CPU seconds, memory (Linux)."""

import argparse
import re
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar


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


_Result = TypeVar("_Result")


def cpu_seconds(work: Callable[[], _Result]) -> tuple[float, _Result]:
    """Return the CPU seconds of this process for a call, and its result."""
    started_s = time.process_time()
    result = work()
    return time.process_time() - started_s, result


def resident_bytes(pid: int | str = "self", name: str = "VmRSS") -> int:
    """Return the memory that a process has in use, or another number of its status."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, f"/proc/{pid}/status has no {name}"
    return 1024 * int(found[1])


def peak_resident_bytes() -> int:
    """Return the most memory that this process has had in use."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_digits(figures: Mapping[str, float], digits: int = 4) -> dict[str, float]:
    """Return numbers in so many significant digits; truth values stay."""
    return {
        name: each if isinstance(each, bool) else float(f"{each:.{digits}g}")
        for name, each in figures.items()
    }
