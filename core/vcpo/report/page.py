"""The report of a run: one HTML file that needs nothing from outside and sends nothing out.

Names, messages and reasons come from users and workers. The template escapes them. Should one slip
through, the page's content policy still allows only the script whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from vcpo.records.journal import EventRecord, Metrics, read_events, read_metrics
from vcpo.report.chart import FULL, SMALL, Chart, draw_chart
from vcpo.report.figures import detail_charts, main_charts
from vcpo.report.findings import findings
from vcpo.report.plot import Size
from vcpo.report.readout import Readout, readout_of
from vcpo.report.summary import headlines, state_of
from vcpo.spec import VCPORun, load_run, run_to_yaml

REPORT_FILE = "report.html"
SPEC_FILE = "spec.yaml"

MAX_EVENTS = 500
"""Largest number of events listed; of more, the newest are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart in the form that the template needs."""

    chart: Chart
    svg: Markup
    readout: Readout
    legend: tuple[tuple[str, str, str], ...]
    """Style, ink and label of each series."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from a run directory's records; an older one is replaced atomically.

    Raises:
        SpecError: when `spec.yaml` is missing or is not a run.
        OSError: when the report cannot be written; no part of it is left then.
    """
    run = load_run(run_dir / SPEC_FILE)
    page = render_report(run, read_metrics(run_dir), read_events(run_dir))
    path = run_dir / REPORT_FILE
    unfinished = path.with_suffix(".html.tmp")
    try:
        unfinished.write_text(page, encoding="utf-8")
        return unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def render_report(run: VCPORun, metrics: Metrics, events: Sequence[EventRecord]) -> str:
    """Return the report as an HTML document, which depends on the arguments only."""
    style, script = _asset("page.css"), _asset("page.js")
    return _template().render(
        run=run,
        state=state_of(run, metrics),
        headlines=headlines(run, metrics, events),
        findings=findings(run, metrics),
        main_figures=[_figure(chart, FULL) for chart in main_charts(run, metrics)],
        detail_figures=[_figure(chart, SMALL) for chart in detail_charts(metrics)],
        events=tuple(events)[-MAX_EVENTS:],
        num_events=len(events),
        spec_yaml=run_to_yaml(run),
        style=Markup(style),  # noqa: S704  both are files of this package
        script=Markup(script),  # noqa: S704
        style_digest=_digest(style),
        script_digest=_digest(script),
    )


def _figure(chart: Chart, size: Size) -> Figure:
    return Figure(
        chart=chart,
        svg=Markup(draw_chart(chart, size)),  # noqa: S704  `draw_chart` escapes its texts
        readout=readout_of(chart, size),
        legend=tuple(
            (series.style.value, series.ink.value, series.label) for series in chart.series
        ),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["clock"] = _clock
    return environment.from_string(_asset("page.html.j2"))


def _clock(time_unix_s: float) -> str:
    return datetime.fromtimestamp(time_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _asset(name: str) -> str:
    return resources.files("vcpo.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return a text's digest as a content security policy spells it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
