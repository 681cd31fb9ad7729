"""Numbers for people: means of what there is, missing numbers, durations, short decimals."""

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from statistics import fmean

UNKNOWN = "-"
"""Written for a number that is missing or not finite; ASCII, so that every log can hold it."""


def finite(value: float | None) -> float | None:
    """Return the value, or None when it is missing, infinite or not a number."""
    return value if value is not None and math.isfinite(value) else None


def mean(values: Iterable[float]) -> float | None:
    """Return the arithmetic mean, or None when there is no value."""
    known = tuple(values)
    return fmean(known) if known else None


def decimal(value: float | None, form: str) -> str:
    """Format a number with a format specification such as `.2f`."""
    return UNKNOWN if finite(value) is None else format(value, form)


def whole(value: int | None) -> str:
    """Write a count with separated thousands."""
    return UNKNOWN if value is None else f"{value:,}"


def compact(value: float) -> str:
    """Write a number with at most four significant digits: `0`, `0.125`, `1,234`, `2.5e-06`."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.3g}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Write a duration as `2h 05m`, `3m 12s` or `8s`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    minutes, rest_s = divmod(round(max(0.0, seconds)), 60)
    hours, rest_m = divmod(minutes, 60)
    if hours:
        return f"{hours}h {rest_m:02d}m"
    return f"{minutes}m {rest_s:02d}s" if minutes else f"{rest_s}s"


def moment(time_unix_s: float) -> str:
    """Write a Unix time as `2026-01-31 23:59:59`, in UTC."""
    return datetime.fromtimestamp(time_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
