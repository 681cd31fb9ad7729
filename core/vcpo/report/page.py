"""The page of a report: an HTML file that needs nothing from outside and sends nothing out.

Names, messages and reasons come from users and workers. The templates escape them. Should one slip
through, the page's content policy still allows only the script whose digest it names.
"""

import base64
import hashlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from vcpo.api import run_to_yaml
from vcpo.records.reasons import DropReason
from vcpo.records.samples import write_whole
from vcpo.report.charts import main_charts, page_data, sections
from vcpo.report.numbers import compact, decimal, finite, mean, moment, whole
from vcpo.report.outcome import chance_text, left_out, resume_command
from vcpo.report.recorded_run import MAX_EVENTS, SPEC_FILE, RecordedRun, event_rows, read_run

REPORT_FILE = "report.html"

STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = (
    "labels.js",
    "vendor/uPlot.iife.min.js",
    "drawing.js",
    "view.js",
    "pointer.js",
    "page.js",
)
"""The page's script, in the order in which its parts need each other."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from a run directory's records; an older one is replaced atomically."""
    return write_whole(run_dir / REPORT_FILE, render_report(read_run(run_dir)))


def render_report(recorded: RecordedRun, *others: RecordedRun) -> str:
    """Return the report of a run as an HTML document, which depends on the arguments only.

    others: laid over the first in each chart; the page then has no samples and no events.
    """
    run = recorded.run
    style = "".join(map(_asset, STYLES))
    script = "".join(map(_asset, SCRIPTS))
    main, *charts = main_charts(run)
    content = {
        "run": run,
        "outcomes": [_outcome(each) for each in (recorded, *others)],
        "main": main,
        "charts": charts,
        "sections": sections(),
        "rows": event_rows(recorded.events[-MAX_EVENTS:]),
        "num_events": len(recorded.events),
        "num_shown": min(MAX_EVENTS, len(recorded.events)),
        "answers": recorded.answers,
        "samples": recorded.samples,
        "spec_yaml": run_to_yaml(run),
        "payload": page_data(recorded, *others),
        "style": Markup(style),  # noqa: S704  all are files of this package
        "script": Markup(script),  # noqa: S704
        "style_digest": _digest(style),
        "script_digest": _digest(script),
    }
    return _environment().get_template("report.html.j2").render(content)


_SAID = {"complete", "interrupted", "skips"}
"""Judgements that the page's head says in other words."""


def _outcome(recorded: RecordedRun) -> dict[str, object]:
    phase, metrics = recorded.phase, recorded.metrics
    can_resume = phase in {"interrupted", "failed"}
    spec_file = recorded.run_dir / SPEC_FILE
    said = _SAID | {"left out"} if phase == "failed" else _SAID  # the failure says the cause
    findings = [each for each in recorded.judgements if each.name not in said]
    told = [DropReason.GENERATION_FAILED] if "left out" in {each.name for each in findings} else []
    lost = left_out(metrics, but=told)
    return {
        "name": f"{recorded.run.metadata.name}",
        "folder": recorded.run_dir.name,
        "phase": phase,
        "state": f"{phase} at step {whole(recorded.last_step)}" if can_resume else phase,
        "headline": recorded.headline,
        "chance": chance_text(metrics),
        "findings": findings,
        "resume": resume_command(spec_file, recorded.run_dir) if can_resume else "",
        "facts": [*(f"Not trained on: {each}" for each in lost), *_facts(recorded)],
    }


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_asset),
    )
    environment.filters["clock"] = moment
    environment.filters["compact"] = compact
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def _asset(name: str) -> str:
    return resources.files("vcpo.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _facts(recorded: RecordedRun) -> Iterator[str]:
    steps, num_sessions = recorded.metrics.steps, recorded.clock.num_sessions
    if not steps:
        return
    sessions = f", in {num_sessions} sessions" if num_sessions > 1 else ""
    speed = mean(each for step in steps if (each := finite(step.tokens_per_s)) is not None)
    yield f"{whole(steps[-1].consumed)} responses, {decimal(speed, ',.0f')} tokens/s{sessions}"
