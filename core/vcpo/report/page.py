"""The page of a report: an HTML file that needs nothing from outside and sends nothing out.

Names, messages and reasons come from users and workers. The templates escape them. Should one slip
through, the page's content policy still allows only the script whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from statistics import fmean

import jinja2
from markupsafe import Markup

from vcpo.algo.advantage import BaselineScope
from vcpo.api import VCPORun, run_to_yaml
from vcpo.api.algorithm import Algorithm
from vcpo.records.journal import Metrics, failure_of
from vcpo.report.charts import main_charts, page_data, sections
from vcpo.report.numbers import UNKNOWN, compact, decimal, duration, finite, whole
from vcpo.report.recorded_run import MAX_EVENTS, RecordedRun, event_rows, read_run

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
    return write_page(run_dir / REPORT_FILE, render_report(read_run(run_dir)))


def write_page(path: Path, page: str) -> Path:
    """Write a page; an older one is replaced atomically."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(page, encoding="utf-8")
        return unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def render_report(recorded: RecordedRun) -> str:
    """Return the report of a run as an HTML document, which depends on the argument only."""
    run = recorded.run
    style = "".join(map(_asset, STYLES))
    script = "".join(map(_asset, SCRIPTS))
    content = {
        "run": run,
        "recipe": recipe(run.spec.algorithm),
        "state": recorded.phase,
        "failure": failure_of(recorded.events),
        "headlines": headlines(recorded),
        "findings": recorded.judgements,
        "charts": main_charts(run),
        "sections": sections(),
        "rows": event_rows(recorded.events[-MAX_EVENTS:]),
        "num_events": len(recorded.events),
        "num_shown": min(MAX_EVENTS, len(recorded.events)),
        "samples": recorded.samples,
        "spec_yaml": run_to_yaml(run),
        "payload": page_data(recorded),
        "style": Markup(style),  # noqa: S704  all are files of this package
        "script": Markup(script),  # noqa: S704
        "style_digest": _digest(style),
        "script_digest": _digest(script),
    }
    return _environment().get_template("report.html.j2").render(content)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_asset),
    )
    environment.filters["clock"] = _clock
    environment.filters["compact"] = compact
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def _clock(time_unix_s: float) -> str:
    return datetime.fromtimestamp(time_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _asset(name: str) -> str:
    return resources.files("vcpo.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_OFF = ("none", "open")
"""Values of stages that do nothing; they are left out."""


def recipe(algorithm: Algorithm) -> tuple[tuple[str, str], ...]:
    """Return the stages of the method in force, by name, also where the file leaves them to it.

    Baseline and learning-rate rule are always named, the other stages where they do something.
    """
    config = algorithm.loss_config
    scope = ", one per batch" if config.baseline_scope is BaselineScope.BATCH else ""
    optional = (
        ("filter", config.group_filter),
        ("KL penalty", config.kl_penalty),
        ("weight", config.weight),
        ("clipping", config.clipping),
    )
    return (
        ("method", algorithm.method.value),
        *((("loss", algorithm.loss),) if algorithm.loss else ()),
        *((name, stage.value) for name, stage in optional if stage.value not in _OFF),
        ("aggregation", config.aggregation.value),
        ("baseline", f"{config.baseline}{scope}"),
        ("learning-rate rule", config.learning_rate_rule.value),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One number in large print."""

    label: str
    value: str
    note: str = ""


def headlines(recorded: RecordedRun) -> tuple[Headline, ...]:
    """Return the numbers that a reader wants first."""
    run, metrics = recorded.run, recorded.metrics
    taken = metrics.steps[-1].step if metrics.steps else 0
    return (
        _accuracy(metrics),
        Headline(label="Steps", value=whole(taken), note=f"of {whole(run.spec.steps)}"),
        _wall_time(recorded),
        _trajectories(metrics),
        _lag(run, metrics),
        _ess(metrics),
    )


def _accuracy(metrics: Metrics) -> Headline:
    if not metrics.evaluations:
        return Headline(label="Accuracy", value=UNKNOWN, note="not evaluated yet")
    first, last = metrics.evaluations[0], metrics.evaluations[-1]
    if first.step == last.step:
        value = decimal(first.accuracy, ".3f")
    else:
        value = f"{decimal(first.accuracy, '.3f')} → {decimal(last.accuracy, '.3f')}"
    return Headline(label="Accuracy", value=value, note=f"held out, at step {whole(last.step)}")


def _wall_time(recorded: RecordedRun) -> Headline:
    total_s = recorded.clock.total_s
    steps, num_sessions = recorded.metrics.steps, recorded.clock.num_sessions
    speeds = [speed for step in steps if (speed := finite(step.tokens_per_s)) is not None]
    notes = [f"{fmean(speeds):,.0f} tokens/s on average"] if speeds else []
    if num_sessions > 1:
        notes.append(f"in {num_sessions} sessions")
    return Headline(label="Wall time", value=duration(total_s), note=", ".join(notes))


def _trajectories(metrics: Metrics) -> Headline:
    if not metrics.steps:
        return Headline(label="Trajectories consumed", value=UNKNOWN)
    last = metrics.steps[-1]
    note = f"{whole(last.leased)} leased, {whole(sum(last.dropped.values()))} dropped"
    if last.dropped:
        reasons = sorted(last.dropped.items(), key=lambda item: (-item[1], item[0]))
        note += f" ({', '.join(f'{reason} {whole(count)}' for reason, count in reasons)})"
    return Headline(label="Trajectories consumed", value=whole(last.consumed), note=note)


def _lag(run: VCPORun, metrics: Metrics) -> Headline:
    limit = run.spec.algorithm.max_policy_lag_steps
    note = f"versions; limit {limit}"
    means = [mean for step in metrics.steps if (mean := finite(step.lag_mean)) is not None]
    if not means:
        return Headline(label="Lag, mean / max", value=UNKNOWN, note=note)
    worst = max(step.lag_max for step in metrics.steps)
    value = f"{sum(means) / len(means):.1f} / {worst}"
    return Headline(label="Lag, mean / max", value=value, note=note)


def _ess(metrics: Metrics) -> Headline:
    known = [step for step in metrics.steps if step.has_weights]
    if not known:
        return Headline(label="Lowest ESS ratio", value=UNKNOWN)
    lowest = min(known, key=lambda step: step.ess_ratio)
    on_policy = decimal(lowest.on_policy_ess_ratio, ".2f")
    note = f"at step {whole(lowest.step)}; on-policy {on_policy}"
    return Headline(label="Lowest ESS ratio", value=decimal(lowest.ess_ratio, ".2f"), note=note)
