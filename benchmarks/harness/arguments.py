"""Types of the benchmarks' command lines."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Read an integer of at least 1.

    Raises:
        argparse.ArgumentTypeError: if it is less.
    """
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number
