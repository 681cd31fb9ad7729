"""Runs whose reports the browser opens, and what the tests ask of a page."""

from __future__ import annotations

import math
from pathlib import Path

from tests.fixtures.records import evaluation_record, step_record
from tests.integration.browser import Page
from vcpo.records.journal import EventRecord, Journal
from vcpo.records.step_record import StepRecord

PHONE = (390, 844)
"""Width and height of a phone's screen, in pixels."""

_SPEC = """
apiVersion: vcpo.dev/v1alpha1
kind: VCPORun
metadata: {name: countdown}
spec:
  model: {name: models/tiny}
  environment: {name: countdown}
  steps: 400
  algorithm: {maxPolicyLagSteps: 8}
"""

BROKEN_WORDS = """(() => {
  const broken = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    const holder = text.parentElement;
    if (!holder.checkVisibility() || holder.closest("svg, script, pre")) continue;
    for (const word of text.data.matchAll(/[^\\s\\u00ad/-]+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
      if (lines.size > 1) broken.push(word[0]);
    }
  }
  return broken;
})()"""
"""Words of the page that are broken over two lines."""


def write_run(run_dir: Path, *, num_steps: int = 400, method: str = "vcpo") -> Path:
    """A run in which every tenth step is alike, and two steps are skipped."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "spec.yaml").write_text(_SPEC.replace("{maxP", f"{{method: {method}, maxP"))
    journal = Journal(run_dir)
    journal.event(event(0.0, "Started", "countdown: 400 steps"))
    for step in range(1, num_steps + 1):
        journal.step(a_step(step))
    for step in range(0, num_steps + 1, 100):
        journal.evaluation(
            evaluation_record(step=step, time_unix_s=2.0 * step, accuracy=step / 400)
        )
    for step in (7, 8, 9):
        journal.event(event(2.0 * step, "StepSkipped", f"step {step}: the rewards are all equal"))
    journal.event(event(900.0, "WorkerLost", "<script>document.title = 'owned'</script> is gone"))
    return run_dir


def event(time_unix_s: float, kind: str, message: str) -> EventRecord:
    return EventRecord(time_unix_s=time_unix_s, source="host", kind=kind, message=message)


def a_step(step: int) -> StepRecord:
    skipped = "no_gradient" if step in {150, 300} else None
    return step_record(
        step=step,
        time_unix_s=2.0 * step,
        reward_mean=0.5 + 0.2 * math.sin(step),
        ess_ratio=0.0 if skipped else 0.6,
        on_policy_ess_ratio=0.9,
        learning_rate_scale=0.0 if skipped else 0.8,
        gradient_norm=0.0 if skipped else 1.0,
        lag_mean=2.0,
        lag_p50=2,
        lag_max=5,
        lag_limit_steps=8,
        diagnostics={"kl_per_token": 10.0 ** -(step % 4)},
        ess_by_lag={"0": 0.9, "2": 0.4},
        dropped={"lag": step // 10},
        skipped=skipped,
    )


def middle_of(page: Page, chart: str) -> tuple[float, float]:
    """A point in the middle of a chart's plot area."""
    page.ask(f"document.querySelector('{chart}').scrollIntoView({{block: 'center'}})")
    box = page.box(f"{chart} .u-over")
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def plot(chart: str) -> str:
    """The uPlot of a chart, as an expression of the page's script."""
    return f"page.drawn.find(({{ figure }}) => figure.id === '{chart.removeprefix('#')}').plot"


def ticks(page: Page, chart: str = "#chart-lag", *, axis: int = 0) -> list[str]:
    """The labels of a chart's axis: 0 is the horizontal one."""
    labels: list[str] = page.ask(
        f"{plot(chart)}.axes[{axis}]._values.filter((label) => label !== '')"
    )
    return labels
