"""The report in a real browser: it draws itself, answers its reader, and asks for nothing."""

import math
from pathlib import Path

import pytest

from tests.fixtures.records import evaluation_record, step_record
from vcpo.records.journal import EventRecord, Journal
from vcpo.records.step_record import StepRecord
from vcpo.report import write_report

pytestmark = pytest.mark.browser
SPEC = """
metadata: {name: countdown}
spec:
  model: {name: models/tiny}
  environment: {name: countdown}
  steps: 400
  algorithm: {maxPolicyLagSteps: 8}
"""
MESSAGES = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


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


def write_run(run_dir: Path, *, num_steps: int = 400) -> Path:
    """A run of which two steps are skipped."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "spec.yaml").write_text(SPEC)
    journal = Journal(run_dir)
    journal.event(event(0.0, "Started", "countdown: 400 steps"))
    for step in range(1, num_steps + 1):
        journal.step(a_step(step))
    for step in range(0, num_steps + 1, 100):
        journal.evaluation(
            evaluation_record(step=step, time_unix_s=2.0 * step, accuracy=step / 400)
        )
    journal.event(event(900.0, "WorkerLost", "<script>document.title = 'owned'</script> is gone"))
    return run_dir


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(write_run(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture
def page(browser, report):
    """A tab with the report of the run."""
    return browser.page(report.as_uri())


def plot(chart: str) -> str:
    """The uPlot of a chart, as an expression of the page's script."""
    return f"page.drawn.find(({{ figure }}) => figure.id === 'chart-{chart}').plot"


def column_of(page, chart, label):
    """The values of a curve, as uPlot has them; None if it is hidden."""
    curves = f"page.drawn.find(({{ chart }}) => chart.name === '{chart}').chart.curves"
    index = page.ask(f"{curves}.findIndex((curve) => curve.label === '{label}')") + 1
    return page.ask(f"{plot(chart)}.series[{index}].show ? {plot(chart)}.data[{index}] : null")


def box(page, selector):
    found = f"document.querySelector({selector!r})"
    page.ask(f"{found}.scrollIntoView({{block: 'center'}})")
    return page.ask(f"{found}.getBoundingClientRect().toJSON()")


def middle_of(page, selector: str) -> tuple[float, float]:
    found = box(page, selector)
    return found["x"] + found["width"] / 2, found["y"] + found["height"] / 2


def click(page, selector):
    page.drag(middle_of(page, selector), middle_of(page, selector))


def ticks(page, chart="lag", *, axis=0):
    return page.ask(f"{plot(chart)}.axes[{axis}]._values.filter((label) => label !== '')")


def colors_of(page, chart):
    """The colors of at least 20 pixels of a chart that no gray is."""
    return page.ask(f"""(() => {{
      const {{ ctx }} = {plot(chart)};
      const found = {{}};
      const {{ data }} = ctx.getImageData(0, 0, ctx.canvas.width, ctx.canvas.height);
      for (let at = 0; at < data.length; at += 4) {{
        const [red, green, blue, alpha] = data.slice(at, at + 4);
        if (alpha < 255 || Math.max(red, green, blue) - Math.min(red, green, blue) < 40) continue;
        const name = [red, green, blue].map((part) => part.toString(16).padStart(2, "0")).join("");
        found[name] = (found[name] ?? 0) + 1;
      }}
      return Object.keys(found).filter((name) => found[name] >= 20);
    }})()""")


def test_curves_cells_and_bands_are_drawn_in_their_colors(page):
    inks = {"reward": "2563c9", "warning": "2563c9", "ess": "2563c9", "lag": "14806a"}
    for name, ink in inks.items():
        assert ink in colors_of(page, name), name
    assert {"eda35a", "3d7cc2"} <= set(colors_of(page, "ess-by-lag"))  # 0.4 and 0.9, of 8 levels
    band = f"""(() => {{
      const {{ ctx, bbox }} = {plot("warning")};
      const heights = [0.15, 0.5, 0.9].map((share) => bbox.top + share * bbox.height);
      return heights.map((y) => ctx.getImageData(bbox.left + 4, y, 1, 1).data[3] > 0);
    }})()"""
    assert page.ask(band) == [True, True, False]  # critical, warn, none


def test_a_skipped_step_is_a_mark_and_a_gap_and_no_zero(page):
    scale = column_of(page, "step-size", "each step")
    known = page.ask(f"{plot('step-size')}.data[0]")
    assert [known[row] for row, value in enumerate(scale) if value is None] == [150, 300]
    assert {value for value in scale if value is not None} == {0.8}
    assert "c0304a" in colors_of(page, "step-size")


def test_no_script_in_a_message_is_run_and_the_page_asks_for_nothing(page, report):
    assert page.ask("document.title").strip() == "countdown · VCPO report"
    asked = {each["request"]["url"] for each in page.told("Network.requestWillBeSent")}
    assert {url for url in asked if not url.startswith("data:")} == {report.as_uri()}
    assert page.told(*MESSAGES) == []


def test_pointing_at_a_chart_reads_out_that_step_and_marks_it_everywhere(page):
    page.mouse("Moved", *middle_of(page, "#chart-lag .u-over"))
    assert page.words("#readout") == "step 200 · 6m 40s max 5 p50 2 mean 2 lag limit 8 most 8 8"
    shown = "page.drawn.filter(({ figure }) => !figure.hidden)"
    assert page.ask(f"{shown}.every(({{ plot }}) => plot.cursor.left > 0)")


def test_dragging_zooms_all_charts_and_a_double_click_shows_all(page):
    before = ticks(page)
    x, y = middle_of(page, "#chart-lag .u-over")
    page.drag((x, y), (x + 60, y))
    assert page.words("#range").startswith("steps 200 to 24")
    assert set(ticks(page, "reward")) <= {str(step) for step in range(200, 250)}
    for clicks in (1, 2):
        at = middle_of(page, "#chart-lag .u-over")
        page.drag(at, at, clicks)
    assert ticks(page) == before


def test_a_legend_entry_hides_its_curve_and_brings_it_back(page):
    entry = "#chart-lag .entry[data-key='lag/max']"
    before = column_of(page, "lag", "max")
    click(page, entry)
    assert column_of(page, "lag", "max") is None
    click(page, entry)
    assert column_of(page, "lag", "max") == before


def test_a_long_run_is_drawn_as_the_envelope_of_its_steps(browser, tmp_path):
    page = browser.page(write_report(write_run(tmp_path, num_steps=1600)).as_uri())
    page.mouse("Moved", *middle_of(page, "#chart-reward .u-over"))
    assert page.words("#readout").startswith("steps ")
    strokes = [value for value in column_of(page, "reward", "each step") if value is not None]
    assert len(strokes) == 1600  # two ends for each pair of steps
    assert min(strokes) == pytest.approx(0.3, abs=1e-3)
    assert max(strokes) == pytest.approx(0.7, abs=1e-3)
