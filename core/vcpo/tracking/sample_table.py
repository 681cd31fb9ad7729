"""Answers of an evaluation as a table, for services that may have texts (`sinks[].samples`)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

from vcpo.api.tracking import Sink as SinkSettings
from vcpo.records.samples import Sample, read_evaluation
from vcpo.tracking.sink import TrackedRun

TITLE: Final = "evaluation/samples"
"""Name of the table in a service."""
COLUMNS: Final = ("prompt", "response", "reward", "parts", "tokens", "end")


def table_rows(settings: SinkSettings, tracked: TrackedRun, step: int) -> list[list[str | float]]:
    """Return a row for each answer that the evaluation at a step kept, in the order of `COLUMNS`.

    There is none if the service gets no texts.
    """
    if not settings.samples:
        return []
    return [_row(each) for each in read_evaluation(tracked.run_dir, step)]


def table_page(rows: Sequence[Sequence[str | float]]) -> str:
    """Return the table in Markdown, with texts that no viewer takes for markup."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(map(_cell, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(sample: Sample) -> list[str | float]:
    parts = ", ".join(f"{name} {value:g}" for name, value in sample.reward_parts.items())
    told: list[str | float] = [sample.prompt, sample.response, sample.reward, parts]
    return [*told, sample.response_tokens, sample.finish_reason]


def _cell(value: str | float) -> str:
    text = html.escape(value if isinstance(value, str) else f"{value:g}")
    for sign in "|`*_[]\\":
        text = text.replace(sign, f"&#{ord(sign)};")
    return "<br>".join(text.splitlines())
